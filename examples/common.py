"""Shared by the examples: their arguments and their model."""

from argparse import ArgumentParser, Namespace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from torch_moe_metal.commands.common.cli import CannotRun
from torch_moe_metal.commands.common.devices import add_device, check_device
from torch_moe_metal.commands.common.loading import MODEL, Source, loading


class Parser(ArgumentParser):
    """The arguments of an example: a checkpoint and a device."""

    def __init__(self, documentation: str):
        super().__init__(description=documentation.split("\n")[0])
        default = "(default: a small Qwen3-MoE with random weights)"
        self.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help=f"{MODEL} {default}")
        add_device(self)

    def model(self, options: Namespace) -> PreTrainedModel:
        """The model of the checkpoint, or a small one. A failure ends the example with one line and exit code 2."""
        torch.manual_seed(0)
        try:
            check_device(options.device)
            if options.checkpoint is None:
                return small_model().to(options.device).eval()
            source = Source.of(options.checkpoint)
            with loading(options.checkpoint, options.device):
                where = {"dtype": "auto", "device_map": options.device, **source.where}
                return AutoModelForCausalLM.from_pretrained(source.path, **where).eval()
        except CannotRun as reason:
            self.exit(2, f"{self.prog}: {reason}\n")


def small_model() -> PreTrainedModel:
    """A placeholder for your own model: a small Qwen3-MoE with random weights."""
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    return AutoModelForCausalLM.from_config(config)


def random_prompt(model: PreTrainedModel, *shape: int) -> torch.Tensor:
    return torch.randint(0, model.config.get_text_config().vocab_size, shape, device=model.device)

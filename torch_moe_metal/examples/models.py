"""What the examples share: their arguments, and the model that they run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from ..bench.calls import Unfit
from ..bench.here import add_device, check_device
from ..loading import HUB_NAME, say


class Parser(ArgumentParser):
    """An example's arguments: a checkpoint, and where it runs. What cannot be had ends it with one line and code 2."""

    def __init__(self, name: str, documentation: str, optional: bool = True):
        super().__init__(prog=f"python -m {__package__}.{name}", description=documentation.split("\n")[0])
        told = "a checkpoint's folder, a GGUF file, or a name on Hugging Face's hub, such as openai/gpt-oss-20b"
        if optional:
            told += " (default: none, but a small Qwen3-MoE with random weights)"
        self.add_argument("checkpoint", nargs="?" if optional else None, help=told)
        add_device(self)

    def parse_args(self, *arguments) -> Namespace:
        options = super().parse_args(*arguments)
        try:
            check_device(options.device)
        except Unfit as reason:
            self.end(str(reason))
        folder = Path(options.checkpoint or "")
        if folder.suffix == ".gguf" and folder.is_file():
            return options
        if not folder.is_dir() and not HUB_NAME.fullmatch(options.checkpoint):
            self.end(f"no such folder: {folder}")
        if options.checkpoint and folder.is_dir() and not (folder / "config.json").is_file():
            self.end(f"no checkpoint, since it has no config.json: {folder}")
        return options

    def end(self, reason: str) -> None:
        self.exit(2, f"{self.prog}: {reason}\n")

    @contextmanager
    def loading(self, what: object, device: str) -> Iterator[None]:
        say(f"Loading {what} on {device} ...")
        try:
            yield
        except Exception as error:  # what is missing or broken, transformers tells by a dozen kinds of exceptions
            told = str(error).strip().splitlines() or [type(error).__name__]
            self.end(f"cannot load {what}: {told[0]}")

    def model(self, options: Namespace) -> PreTrainedModel:
        """The checkpoint's model, or the small one."""
        torch.manual_seed(0)
        if options.checkpoint is None:
            return small_model().to(options.device).eval()
        with self.loading(options.checkpoint, options.device):
            how = {"dtype": "auto", "device_map": options.device}
            return AutoModelForCausalLM.from_pretrained(options.checkpoint, **how).eval()


def small_model() -> PreTrainedModel:
    """Stands for your own model: a small Qwen3-MoE with random weights."""
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

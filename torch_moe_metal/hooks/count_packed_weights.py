"""Make transformers and PEFT count packed weights, which are buffers, as the numbers that they stand for. That is how
they count the 4-bit weights of bitsandbytes."""

import functools


def count_in_transformers() -> None:
    """`num_parameters`. Packed weights are never trainable."""
    from transformers.modeling_utils import PreTrainedModel

    stock = PreTrainedModel.num_parameters

    @functools.wraps(stock)
    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        from ..transformers.fusing.packed_modules import count

        packed = 0 if only_trainable else count(self, embeddings=not exclude_embeddings)
        return stock(self, only_trainable, exclude_embeddings) + packed

    PreTrainedModel.num_parameters = num_parameters


def count_in_peft() -> None:
    """`get_nb_trainable_parameters`, which `print_trainable_parameters` prints."""
    from peft.peft_model import PeftModel

    stock = PeftModel.get_nb_trainable_parameters

    @functools.wraps(stock)
    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        from ..transformers.fusing.packed_modules import count

        trainable, dense = stock(self)
        return trainable, dense + count(self)

    PeftModel.get_nb_trainable_parameters = get_nb_trainable_parameters

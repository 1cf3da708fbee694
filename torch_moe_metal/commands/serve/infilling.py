"""Prompts for text between two others, for models that have tokens for it."""

from transformers import PreTrainedTokenizerBase

#: The tokens before the text's beginning, before its end, and before what the model writes.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)
#: Tokens that models write after it.
ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|endoftext|>", "<fim_pad>")


class Infilling:
    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        known = tokenizer.get_added_vocab()
        self.tokens = next((each for each in TOKENS if all(token in known for token in each)), None)
        self.ends = {token: known[token] for token in ENDS if token in known}

    def prompt(self, before: str, after: str) -> str:
        first, second, third = self.tokens
        return f"{first}{before}{second}{after}{third}"

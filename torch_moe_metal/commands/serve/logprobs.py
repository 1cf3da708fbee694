"""Log probabilities of an answer's tokens: those of the model itself, before penalties, constraints and temperature."""

from collections.abc import Callable, Sequence

import torch

LEAST = -9999.0  # instead of minus infinity, which JSON has not


class Scored(str):
    """A piece of an answer, with the log probabilities of its tokens."""

    entries: list[dict]
    start: int  # in the answer

    def __new__(cls, text: str, entries: list[dict], start: int) -> "Scored":
        made = super().__new__(cls, text)
        made.entries, made.start = entries, start
        return made


class Recorder:
    """Notes the log probabilities of each step, until the step's token is known."""

    def __init__(self, most: int, decode: Callable[[list[int]], str]):
        self.most, self.decode = most, decode
        self.rows: dict[int, torch.Tensor] = {}

    def change(self, scores: torch.Tensor, tokens: Sequence[int] | torch.Tensor, start: int) -> None:
        self.rows[len(tokens) - start] = scores.float().log_softmax(-1).cpu()

    def entry(self, place: int, token: int) -> dict:
        """OpenAI's object for the answer's token at this place, with the `most` likeliest ones."""
        row = self.rows.pop(place)
        values, ids = row.topk(min(self.most, len(row)))
        likeliest = [self.one(*each) for each in zip(ids.tolist(), values.tolist(), strict=True)]
        return self.one(token, row[token].item()) | {"top_logprobs": likeliest}

    def one(self, token: int, logprob: float) -> dict:
        text = self.decode([token])
        whole = "\ufffd" not in text  # the token may be a part of a character
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode()) if whole else None}


def covering(entries: list[dict], length: int) -> list[dict]:
    """The last entries whose tokens have a text of this length. Those before are marks of the template."""
    start = len(entries)
    while start and length > 0:
        start -= 1
        length -= len(entries[start]["token"]) if entries[start]["bytes"] else 0
    return entries[start:]


def as_text(entries: list[dict], start: int = 0) -> dict:
    """The same in the form of /v1/completions, where texts have an offset."""
    offsets = [start]
    for entry in entries:
        offsets.append(offsets[-1] + len(entry["token"]))
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{each["token"]: each["logprob"] for each in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets[:-1],
    }

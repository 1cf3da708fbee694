"""Prompts with images, videos or sounds in the store of prefixes: their tokens say nothing of what is in them."""

import hashlib

import torch

TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}  # the inputs of a prompt without images
MARKS = ("mm_token_type_ids", "token_type_ids")  # not 0 where a token is part of an image


class Images:
    """The inputs of a prompt besides its text, which belong to some of its tokens."""

    def __init__(self, inputs: dict):
        self.names = inputs.keys() - TEXT
        marks = next((inputs[name] for name in MARKS if name in inputs), None) if self.names else None
        self.places = [] if marks is None else torch.as_tensor(marks).flatten().nonzero().flatten().tolist()
        self.known = not self.names or bool(self.places)  # whether it is known where they are
        self.inputs = inputs

    def key(self, ids: list[int]) -> list[int]:
        """The tokens, with the hash of all images in the place of theirs."""
        if not self.places:
            return ids
        found = hashlib.sha256()
        for name in sorted(self.names):
            value = self.inputs[name]
            found.update(f"{name} {getattr(value, 'shape', value)}".encode())
            if isinstance(value, torch.Tensor):
                found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        mark = -2 - int.from_bytes(found.digest()[:3], "little")
        key = list(ids)
        for place in self.places:
            key[place] = mark
        return key

    def start(self, length: int) -> int:
        """From where a prompt is computed whose first `length` tokens are known: images are computed together."""
        return self.places[0] if self.places and self.places[0] < length <= self.places[-1] else length

    def begin(self, tensors: dict, cached: int, length: int) -> dict | None:
        """The inputs of the first tokens, some of which are cached. None: of some of the images."""
        if self.start(length) != length:
            return None
        found = {name: value[:, :length] if name in TEXT else value for name, value in tensors.items()}
        if self.places and length <= self.places[0]:
            return {name: value for name, value in found.items() if name in TEXT}
        if self.places and cached > self.places[-1]:  # what is left says where the images were
            return {name: value for name, value in found.items() if name in TEXT or not is_image(value)}
        return found


def is_image(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1

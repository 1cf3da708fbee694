"""The store of prefixes: what was computed in an earlier turn, or for another conversation that begins in the same way,
is not computed again.

An entry is a conversation: its tokens, and their cache. Keys and values of full attention can be cropped to any length.
Layers that keep a state or a window cannot, so a model that has them also keeps snapshots: at the end of the system
prompt, before and after the last message of the user, at the end of an answer, and every STEP tokens of a prompt. A
conversation that goes on takes its entry out of the store. Another one that begins in the same way gets a copy of the
beginning.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, PreTrainedModel

from ...transformers.fusing.snapshots import Snapshot, can_crop, fork, restore, snapshot, tensors_of
from .devices import free_memory

if TYPE_CHECKING:
    from .prefix_folder import PrefixFolder

PIECE = 1024  # tokens of a prompt that are computed at once
STEP = 2048  # tokens of a prompt between two snapshots
MOST = 12  # snapshots of a conversation
SHORTEST = 16  # a shorter common beginning of two conversations is computed again
#: A conversation goes on from the end of its last prompt, without the beginning of an answer, which has fewer tokens.
BEGINNING = 32
UNKNOWN = -1  # a token that is in the cache, and that nothing has returned


@dataclass(eq=False)
class Prefix:
    """Tokens that are computed, and their cache."""

    cache: DynamicCache | None  # None: the model has a cache of its own kind
    crops: bool  # whether the cache can be cropped to any length
    ids: list[int] = field(default_factory=list)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by length, in rising order
    prompt: int = 0  # the length of its last prompt
    path: Path | None = None  # its file, maybe of an earlier turn

    def note(self, ids: list[int]) -> None:
        """The cache now has these tokens. If it cannot be cropped, keep a snapshot."""
        self.ids = ids
        if not self.crops and ids:
            self.snapshots[len(ids)] = snapshot(self.cache)
            while len(self.snapshots) > MOST:
                del self.snapshots[least_useful(list(self.snapshots))]

    def reach(self, ids: Sequence[int]) -> int:
        """How many of these tokens the cache can go back to."""
        same = common(self.ids, ids)
        if self.crops or same == len(self.ids):
            return same
        return max((length for length in self.snapshots if length <= same), default=0)

    def go_back(self, length: int) -> None:
        if length == len(self.ids):
            return
        if self.crops:
            self.cache.crop(length - len(self.ids))
        else:
            restore(self.cache, self.snapshots[length])
        self.ids = self.ids[:length]
        self.snapshots = {at: each for at, each in self.snapshots.items() if at <= length}

    def beginning(self, length: int) -> "Prefix":
        """A copy of the first tokens."""
        cache = fork(self.cache, length, self.snapshots.get(length))
        snapshots = {at: each for at, each in self.snapshots.items() if at <= length}
        return Prefix(cache, self.crops, self.ids[:length], snapshots)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from tensors_of(self.cache)
        for each in self.snapshots.values():
            yield from each.tensors()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def least_useful(lengths: list[int]) -> int:
    """The snapshot closest to the one before it. The first one and the last three stay."""
    return min(zip(lengths[1:-3], lengths[:-4], strict=True), key=lambda pair: pair[0] - pair[1])[0]


class Prefixes:
    """The store. Its methods may be called on any thread."""

    def __init__(self, model: PreTrainedModel, limit: float | None = None, folder: "PrefixFolder | None" = None):
        """`limit` in bytes; by default a quarter of the free memory. `folder` keeps them on disk as well."""
        self.config, self.device = model.config.get_text_config(decoder=True), model.device
        self.limit = free_memory(model.device.type) / 4 if limit is None else limit
        self.entries: list[Prefix] = []  # the one that was used last is the last one
        self.lock = threading.Lock()
        self.with_images = [module for module in model.modules() if "rope_deltas" in vars(module)]
        # A cache of the model's own class is not known here.
        usual = model._supports_default_dynamic_cache() and model.generation_config.cache_implementation is None
        self.continues = can_compute_in_pieces(model)
        self.works = usual and self.limit > 0 and self.continues and self.can_go_back()
        self.needs_cuts = self.works and not self.new().crops
        self.folder = folder if self.works else None

    def can_go_back(self) -> bool:
        try:
            snapshot(self.new_cache())
        except TypeError:
            return False
        return True

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def new(self) -> Prefix:
        if not self.works:
            return Prefix(None, False)
        cache = self.new_cache()
        return Prefix(cache, can_crop(cache))

    def forget_images(self) -> None:
        """transformers would add what it keeps of the last prompt's images to the positions of the next one."""
        for module in self.with_images:
            module.rope_deltas = None

    def take(self, ids: list[int], start: Callable[[int], int] = lambda length: length) -> Prefix:
        """What there is of a prompt's beginning, without its last token, which is computed for its logits. It is the
        caller's until `give`. A prompt whose first tokens are known to a length can be computed from `start` on."""
        ids = ids[:-1]
        self.forget_images()
        with self.lock:
            best, length = self.best(ids)
            if (earlier := start(length)) != length:
                best, length = self.best(ids[:earlier])
            if length and length >= best.prompt - BEGINNING:  # it goes on
                self.drop([best])
                best.go_back(length)
                found = best
            else:
                found = best.beginning(length) if length >= SHORTEST else self.new()
        found.prompt = len(ids)
        return found

    def best(self, ids: list[int]) -> tuple[Prefix | None, int]:
        """The prefix that reaches farthest, in memory or on disk, and how far."""
        best = max(self.entries, key=lambda entry: entry.reach(ids), default=None)
        length = 0 if best is None else best.reach(ids)
        stored = self.folder.find(ids, length, self.new_cache, self.device) if self.folder else None
        return (best, length) if stored is None else (stored, stored.reach(ids))

    def before(self, prefix: Prefix, ids: list[int], cuts: Sequence[int]) -> list[list[int]]:
        """The beginnings of a prompt that are computed before it, each followed by a snapshot."""
        if not self.needs_cuts:
            return []
        return [ids[:cut] for cut in sorted(set(cuts)) if len(prefix.ids) < cut < len(ids)]

    def note_step(self, prefix: Prefix, ids: list[int]) -> None:
        """A snapshot of a long prompt, if its last one is STEP tokens ago. Called before each forward."""
        length = prefix.cache.get_seq_length() if self.needs_cuts else 0
        if length - max(prefix.snapshots, default=0) >= STEP and length < len(ids):
            prefix.note(ids[:length])

    def give(self, prefix: Prefix, tokens: list[int]) -> None:
        """Keep a prefix for later requests. `tokens` are those of the prompt and of the answer so far. The prefixes
        that were unused for the longest time leave the store."""
        if prefix.cache is None:
            return
        length = prefix.cache.get_seq_length()
        if length <= len(tokens):
            prefix.note(tokens[:length])
        else:  # on mps `generate` computes a token before it returns the one before, and does not after a cancellation
            prefix.ids = tokens + [UNKNOWN] * (length - len(tokens))
            known = prefix.reach(tokens)
            if not known:
                return
            prefix.go_back(known)
        if not prefix.ids:
            return
        with self.lock:
            self.drop([entry for entry in self.entries if contains(prefix, entry)])
            self.entries.append(prefix)
            if self.folder:
                self.folder.keep(prefix)
            while self.entries and self.nbytes() > self.limit:
                leaving = self.entries.pop(0)
                if self.folder:
                    self.folder.leaves(leaving)

    def drop(self, entries: list[Prefix]) -> None:
        """They are of no use any more as they are."""
        self.entries = [entry for entry in self.entries if entry not in entries]
        for entry in entries if self.folder else ():
            self.folder.goes_on(entry)

    def settle(self) -> None:
        """Wait until what has left the memory is on disk. Not within a turn of the device."""
        if self.folder:
            self.folder.settle()

    def close(self) -> None:
        if self.folder:
            self.folder.close()

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()

    def nbytes(self) -> int:
        """All memory that the store keeps, also the free rows of caches that grow."""
        memory = {}
        for entry in self.entries:
            for tensor in entry.tensors():
                storage = tensor.untyped_storage()
                memory[storage.data_ptr()] = storage.nbytes()
        return sum(memory.values())


def contains(prefix: Prefix, other: Prefix) -> bool:
    """Whether another entry is of no use next to this one."""
    return prefix.reach(other.ids) == len(other.ids)


def cuts(messages: list[dict], ids: list[int], encode: Callable[..., list[int]]) -> list[int]:
    """Where a prompt has snapshots: at the end of the system prompt, and before and after the last message of the user.
    `encode` makes the tokens of messages, without or with the beginning of an answer. A template may refuse a beginning
    of the conversation, or may write it in another way: then it has no cut."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    found = []
    for end in sorted({first, len(messages) - 1, len(messages)} - {0}):
        try:
            found.append(common(encode(messages[:end], False), ids))
        except Exception:  # of the template, which may raise anything
            continue
    return found


@torch.no_grad()
def can_compute_in_pieces(model: torch.nn.Module) -> bool:
    """Whether a prompt has the same logits when it is computed in two pieces. Jamba's mixers lose their state between
    them, and MiniMax's cache exists only after the first forward."""
    ids = torch.arange(2, 10, device=model.device)[None]
    options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"attention_mask": torch.ones_like(ids)}
    whole = model.generate(ids, **options).logits[0]
    try:
        pieces = model.generate(ids, **options, prefill_chunk_size=5).logits[0]
    except Exception:  # transformers has several
        return False
    return bool((whole - pieces).abs().max() < 0.1 * whole.abs().max())

"""Huge pages on Linux, where most pages have 4 KB. A token of an MoE model reads hundreds of megabytes of weights,
which no cache keeps, and with small pages also the page tables of these weights.

Other systems, and a Linux that never gives huge pages, ignore both requests.
"""

import ctypes
import mmap
import os
import sys

import torch


def for_tensors() -> None:
    """Let PyTorch request huge pages for tensors of 2 MB or more. It reads this setting when it allocates the first
    tensor on the CPU. A value that the user has set stays. Commands call this, because it concerns all of a process."""
    if sys.platform == "linux":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def for_file(pages: torch.UntypedStorage) -> None:
    """Request huge pages for a mapped file that is not yet in memory. It is then also read in larger parts."""
    advise(pages, "MADV_HUGEPAGE")


def not_for_file(pages: torch.UntypedStorage) -> None:
    advise(pages, "MADV_NOHUGEPAGE")


def advise(pages: torch.UntypedStorage, advice: str) -> None:
    if sys.platform == "linux" and len(pages):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        madvise(pages.data_ptr(), len(pages), getattr(mmap, advice))

"""Drops transformers' advice to install CUDA packages on machines without such a GPU."""

import logging

import torch

ADVICE = "is falling back to its reference PyTorch implementation because"


def can_be_followed(record: logging.LogRecord) -> bool:
    return ADVICE not in record.getMessage() or torch.cuda.is_available() or torch.xpu.is_available()


def drop() -> None:
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(can_be_followed)

"""Runnable examples: `python -m torch_moe_metal.examples.chat`, `.swap` and `.compiled`."""

"""Modules that run on our ops in place of a model's own: experts, blocks, attention, the KV cache, packed weights."""

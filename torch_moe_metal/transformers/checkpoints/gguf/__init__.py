"""GGUF files in transformers: their configuration, names of weights, and blocks that stay packed."""

"""Loading and saving packed checkpoints: configurations, and the quantizers that `from_pretrained` uses."""

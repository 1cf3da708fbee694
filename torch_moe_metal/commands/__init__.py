"""The commands of `python -m torch_moe_metal`. They import the library, which imports nothing from here."""

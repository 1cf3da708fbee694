"""The entry of `python -m torch_moe_metal`; commands/command_line.py has its commands."""

from .commands.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())

"""A progress bar in the terminal."""

import sys
import time


def minutes(seconds: float) -> str:
    return "{}:{:02}".format(*divmod(int(seconds), 60))


class Progress:
    """A bar on standard error: rows done, the current row, the elapsed time and, as far as that can be known from the
    rows before, the time of all. Only in a terminal."""

    WIDTH = 24

    def __init__(self, rows: int, wanted: bool):
        self.rows, self.done, self.start = rows, 0, time.monotonic()
        self.shown = wanted and sys.stderr.isatty()

    def next(self, now: str) -> None:
        """Show the next row."""
        self.show(self.done, now)
        self.done += 1

    def show(self, done: int, now: str) -> None:
        if self.shown:
            full, elapsed = self.WIDTH * done // self.rows, time.monotonic() - self.start
            bar = "#" * full + "-" * (self.WIDTH - full)
            whole = f" of about {minutes(elapsed / done * self.rows)}" if done else ""
            text = f"[{bar}] {done}/{self.rows}  {now}  {minutes(elapsed)}{whole}"
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

"""Whether `tune` may trust that some settings are faster than others: by more than the noise of the measurement."""

import math
import statistics
from dataclasses import dataclass

MIN_WIN = 0.01  # the smallest relative gain that justifies a setting other than the default


@dataclass(frozen=True)
class Comparison:
    """The gain of some settings over the current ones. For each call it is the median, over the rounds, of the ratio of
    the two times. Noise is three times the error of the mean of these medians, estimated from the spread over the
    rounds, plus the difference between two measurements of the current settings; at least 1 %."""

    won: float  # relative to the time; the mean over all calls
    noise: float

    @property
    def wins(self) -> bool:
        return self.won > self.noise

    def __str__(self) -> str:
        return f"{abs(self.won):.1%} {'faster' if self.won > 0 else 'slower'}, noise {self.noise:.1%}"


def log_ratio(rounds: list[float], base: list[float]) -> tuple[float, float]:
    """The median logarithm of the ratio of two times in one round, and its error."""
    ratios = [math.log(time / other) for time, other in zip(rounds, base, strict=True)]
    middle = statistics.median(ratios)
    spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)  # of a normal distribution
    return middle, 1.2533 * spread / math.sqrt(len(ratios))


def compare(measured: list[list[list[float]]]) -> list[Comparison]:
    """Indexed by call and by candidate. The first two candidates are the current settings. -> one for each other
    candidate"""

    def mean(index: int) -> tuple[float, float]:
        each = [log_ratio(rounds[index], rounds[0]) for rounds in measured]
        return statistics.mean(m for m, _ in each), math.hypot(*(error for _, error in each)) / len(each)

    repeated, _ = mean(1)
    found = []
    for index in range(2, len(measured[0])):
        won, error = mean(index)
        found.append(Comparison(1 - math.exp(won), max(MIN_WIN, abs(repeated) + 3 * error)))
    return found

"""Fuzzes every op against the reference, on every device and instruction set: `make fuzz`.

    python tests/fuzz.py --cases 20000             # a random seed, which it prints
    python tests/fuzz.py --seed 7 --case avx2-123  # repeat one case, with all details

Cases run in child processes, so that a case that kills its process or hangs is reported, and the others still run.
fuzz_cases.py draws the cases, fuzz_checks.py checks the results. MOE_METAL_DEVICES=cpu (or mps) selects a device.
"""

import argparse
import collections
import concurrent.futures
import faulthandler
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_moe_metal.extension import FOLDER, cpu_isa

HERE = Path(__file__).resolve().parent
LEVELS = ("default", "avx2", "avx512")  # a machine that has one also has those before it
AT_ONCE = 2000  # cases per child, which takes some seconds to start
PROCESSES = min(os.cpu_count() or 1, 4)
FAST_TO_MPS = 9  # cases on the CPU for each one on the simulated mps
WORKER = [sys.executable, "-X", "faulthandler", str(Path(__file__).resolve())]
COMMAND = "make fuzz SEED={seed} CASE={target}-{number}"
OUTCOMES = ("right", "refused", "failed")


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


# ------------------------------------------------------------------------------------------------ where cases run


def instruction_sets() -> list[str]:
    """The instruction sets that were built and that this machine supports."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    levels = LEVELS[: LEVELS.index(best) + 1] if best in LEVELS else LEVELS[:1]
    return [level for level in levels if (FOLDER / f"_cpu_{level}.so").exists()]


def targets() -> list[str]:
    devices = os.environ.get("MOE_METAL_DEVICES", "cpu,mps").split(",")
    return instruction_sets() * ("cpu" in devices) + ["mps"] * ("mps" in devices)


def shares(found: list[str], cases: int) -> dict[str, list[int]]:
    """The numbers of the cases for each target; the simulated mps gets fewer."""
    fast = [target for target in found if target != "mps"]
    turns = found if torch.backends.mps.is_built() or not fast else fast * (FAST_TO_MPS // len(fast))
    turns = turns + ["mps"] * ("mps" in found and "mps" not in turns)
    return {target: [n for n in range(cases) if turns[n % len(turns)] == target] for target in found}


# ------------------------------------------------------------------------------------------------ the child


def work(target: str, seed: int, numbers: list[int]) -> None:
    """Runs cases one after the other. Prints the number of each before it starts, and its outcome afterwards."""
    import fuzz_cases
    import fuzz_checks

    device = "mps" if target == "mps" else "cpu"
    if device == "mps" and not torch.backends.mps.is_built():
        import simulated

        simulated.load()
    if device == "cpu":
        assert cpu_isa == target, f"{cpu_isa} was loaded for {target}"
    for number in numbers:
        print("begin", number, flush=True)
        faulthandler.dump_traceback_later(fuzz_checks.SECONDS, exit=True)
        drawn = None
        try:
            drawn = fuzz_cases.draw(seed, number)
            if len(numbers) == 1:
                print(drawn, file=sys.stderr, flush=True)
            torch.set_num_threads(drawn.threads)
            print(fuzz_checks.check(drawn, device), flush=True)
        except Exception as error:
            text = f"{drawn}\n{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError) or len(numbers) == 1:
                text += "\n" + traceback.format_exc()
            print("failed", text.replace("\n", "\v"), flush=True)
        faulthandler.cancel_dump_traceback_later()


# ------------------------------------------------------------------------------------------------ the parent


@dataclass
class Failure:
    target: str
    number: int
    text: str


@dataclass
class Tally:
    seed: int
    cases: int
    command: str = COMMAND  # the command that repeats a case
    outcomes: collections.Counter = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)
    reported: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, target: str, outcome: str) -> None:
        with self.lock:
            self.outcomes[target, outcome] += 1
            if time.monotonic() - self.reported > 5:
                self.reported = time.monotonic()
                done = self.outcomes.total()
                say(f"{done} of {self.cases} cases, {len(self.failures)} failed, {self.reported - self.start:.0f} s")

    def fail(self, target: str, number: int, text: str) -> None:
        with self.lock:
            self.failures.append(Failure(target, number, text))
        self.add(target, "failed")
        say(f"FAILED: {self.again(self.failures[-1])}\n{text}")

    def again(self, failure: Failure) -> str:
        return self.command.format(seed=self.seed, target=failure.target, number=failure.number)


def child(target: str, seed: int, numbers: list[int], worker: list[str], errors) -> subprocess.Popen:
    paths = (str(FOLDER.parent), os.environ.get("PYTHONPATH", ""))  # the parent's package
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"ATEN_CPU_CAPABILITY": target} if target in LEVELS else {}
    environment |= {"OMP_WAIT_POLICY": "passive"}  # waiting threads leave the cores to the other children
    command = [*worker, "--child", target, "--seed", str(seed)]
    process = subprocess.Popen(
        command, cwd=HERE, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    process.stdin.write(" ".join(map(str, numbers)))
    process.stdin.close()
    return process


def run_some(target: str, numbers: list[int], worker: list[str], tally: Tally) -> None:
    """Runs cases in one child, or in several if cases kill it."""
    while numbers:
        with tempfile.TemporaryFile("w+") as errors:
            process = child(target, tally.seed, numbers, worker, errors)
            begun = None
            for line in process.stdout:
                word, _, rest = line.rstrip("\n").partition(" ")
                if word == "begin":
                    begun = int(rest)
                elif word in OUTCOMES:
                    numbers = numbers[numbers.index(begun) + 1 :]
                    if word == "failed":
                        tally.fail(target, begun, rest.replace("\v", "\n"))
                    else:
                        tally.add(target, word)
                    begun = None
            code = process.wait()
            errors.seek(0)
            text = "\n".join(errors.read().splitlines()[-60:])
        if begun is not None:
            tally.fail(target, begun, f"its process ended with {code}:\n{text}")
            numbers = numbers[numbers.index(begun) + 1 :]
        elif code or numbers:
            raise SystemExit(f"A child of {target} ended with {code} before its first case:\n{text}")


def fuzz(
    seed: int,
    cases: int,
    found: list[str] | None = None,
    worker: list[str] = WORKER,
    command: str = COMMAND,
    processes: int = PROCESSES,
) -> Tally:
    tally, found = Tally(seed, cases, command), found or targets()
    say(f"Seed {seed}: {cases} cases on {', '.join(found)}")
    portions = [
        (target, numbers[start : start + AT_ONCE])
        for target, numbers in shares(found, cases).items()
        for start in range(0, len(numbers), AT_ONCE)
    ]
    portions.sort(key=lambda portion: portion[0] != "mps")  # the slow ones first
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda portion: run_some(*portion, worker, tally), portions))
    for target in found:
        counts = {outcome: tally.outcomes[target, outcome] for outcome in OUTCOMES}
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        say(f"{target}: {sum(counts.values())} cases: {text}")
    say(f"Seed {seed}: {len(tally.failures)} of {cases} cases failed, after {time.monotonic() - tally.start:.0f} s")
    for failure in tally.failures:
        say(f"FAILED: {tally.again(failure)}")
    return tally


def one(seed: int, name: str) -> int:
    """One case in a new child, whose output is shown."""
    target, _, number = name.rpartition("-")
    process = child(target, seed, [int(number)], WORKER, None)
    lines = process.stdout.read().replace("\v", "\n")
    print(lines, flush=True)
    return int(process.wait() != 0 or "\nfailed" in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--case", metavar="TARGET-NUMBER")
    parser.add_argument("--target", help="only there: " + ", ".join((*LEVELS, "mps")))
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--child", metavar="TARGET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(options.child, options.seed, [int(number) for number in sys.stdin.read().split()])
        return 0
    if options.case:
        return one(options.seed, options.case)
    found = [options.target] if options.target else None
    return int(bool(fuzz(options.seed, options.cases, found, processes=options.processes).failures))


if __name__ == "__main__":
    sys.exit(main())

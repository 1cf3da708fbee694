"""transformers' own model tests, stock and with every model patched: `python tools/peer_tests.py CHECKOUT`.

CHECKOUT is a folder with the tests of the installed transformers: `git clone --depth 1 --branch v5.23.0
https://github.com/huggingface/transformers` makes one. They need parameterized, Pillow and httpx. For every family that
`patch` fuses, its tests/models/FAMILY/test_modeling_*.py run twice. A test that passes stock and fails patched runs
once more in both ways; if it differs again, it is printed with its error, and the exit status is 1, unless it is one of
BY_DESIGN. transformers itself skips tests that need the network, a GPU or hours, in both runs.

Tests without a seed may fail by chance. In test_*_padding_matches_padding_free_with_position_ids a router in bfloat16
selects another expert where two scores of a tiny random model are nearly equal. With the sizes of flex_olmo they failed
for 3 (eager) and 8 (sdpa) of 30 seeds stock, for 4 and 8 patched, and for none in float32.

With another checkout than that of the installed version, replace its src/transformers by a link to the installed
package, whose tests import from there. Tests that do not fit the installed version fail in both runs. transformers'
tests also need `datasets`.

This file is also the pytest plugin of those runs: it records the result of each test, and patches each model as soon as
it is built or loaded, as a user would.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What `patch` changes on purpose, by the ends of the tests' names.
BY_DESIGN = {
    "test_sdpa_can_dispatch_non_composite_models": "the model's attention is ours, not sdpa",
    "test_tied_weights_keys": "joined projections are parts of one tensor, which this test takes for tied weights",
    # Models with sinks, whose only attention is eager: patch replaces it.
    **{
        f"{family}ModelTest::test_attention_outputs": "config.output_attentions needs set_attn_implementation('eager')"
        for family in ("GptOss", "GraniteMoeSWA", "MiMoV2Flash")
    },
}
PATCHED, RESULTS = "PEER_TESTS_PATCHED", "PEER_TESTS_RESULTS"

# ------------------------------------------------------------------------------------------------ the plugin

ours: Counter = Counter()  # of this process: fused modules, swapped experts, calls of our op


def pytest_configure(config) -> None:
    if os.environ.get(PATCHED):
        patch_every_model()
        count_calls()


def patch_every_model() -> None:
    """A model is complete when its last constructor calls post_init. While from_pretrained builds a model, its weights
    are on no device yet, so it is patched after loading."""
    from transformers import PreTrainedModel

    import torch_moe_metal

    def patch(model):
        if not any(tensor.is_meta for tensor in model.parameters()):
            report = torch_moe_metal.patch(model)
            ours.update(fused=len(report["fused"]), experts=len(report["experts only"]))

    def post_init(self):
        built(self)
        patch(self)

    def from_pretrained(cls, *args, **kwargs):
        result = loaded(cls, *args, **kwargs)
        patch(result[0] if isinstance(result, tuple) else result)
        return result

    built, loaded = PreTrainedModel.post_init, PreTrainedModel.from_pretrained.__func__
    PreTrainedModel.post_init, PreTrainedModel.from_pretrained = post_init, classmethod(from_pretrained)


def count_calls() -> None:
    """Counts calls of `experts`, which every fused block and every experts module calls once. The op itself is not
    replaced, because compilers look up its overloads; calls in compiled code are not counted."""
    import torch
    from torch._ops import OpOverloadPacket

    import torch_moe_metal  # noqa: F401  registers it

    def call(self, /, *args, **kwargs):
        ours["calls"] += self is experts
        return original(self, *args, **kwargs)

    experts = torch.ops.moe_metal.experts
    original, OpOverloadPacket.__call__ = OpOverloadPacket.__call__, call


def write(line: list | dict) -> None:
    if RESULTS in os.environ:
        with open(os.environ[RESULTS], "a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logreport(report) -> None:
    """Called in workers of pytest-xdist and in the process that started them; only the latter may count twice."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.when == "call" or report.outcome != "passed"):
        crash = getattr(report.longrepr, "reprcrash", None)
        write([report.nodeid, report.outcome, (crash.message if crash else str(report.longrepr or "")).strip()])


def pytest_sessionfinish() -> None:
    write(dict(ours))


# ------------------------------------------------------------------------------------------------ a run


@dataclass
class Run:
    """The result of a run of pytest."""

    outcomes: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # the first line of each error, by test
    ours: Counter = field(default_factory=Counter)
    status: int = 0  # of pytest: 0 or 1 if it ran to its end
    output: str = ""

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}

    def take(self, line: list | dict) -> None:
        if isinstance(line, dict):
            self.ours.update(line)
            return
        test, outcome, message = line
        worst = ("failed", "passed", "skipped")  # subtests are reported under the name of their test
        self.outcomes[test] = min(outcome, self.outcomes.get(test, outcome), key=worst.index)
        if outcome == "failed":
            self.errors.setdefault(test, message.splitlines()[0] if message else "failed")


def run(checkout: Path, tests: list[str], patched: bool, options: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results")
        results.touch()
        path = [str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(path), RESULTS: str(results), PATCHED: "1" if patched else ""}
        command = [sys.executable, "-m", "pytest", "-p", "peer_tests", "-p", "no:cacheprovider", "-q", *options, *tests]
        # Without a network, every test that downloads a file would wait for a timeout.
        environment = {"HF_HUB_OFFLINE": "1", **os.environ, **variables}
        # this may be started by a worker of our own tests, but is no worker itself
        environment.pop("PYTEST_XDIST_WORKER", None)
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        found = Run(status=done.returncode, output=done.stdout + done.stderr)
        for line in results.read_text().splitlines():
            found.take(json.loads(line))
    return found


# ------------------------------------------------------------------------------------------------ a family


@dataclass
class Comparison:
    """One family's tests, stock and patched."""

    stock: Run
    patched: Run
    differing: list[str]
    once: list[str]  # differed at first, but not when repeated

    def trouble(self) -> str | None:
        """The reason why this run proves nothing, or None."""
        if set(self.stock.outcomes.values()) == {"skipped"}:
            return "every test is skipped"
        for name, run in (("stock", self.stock), ("patched", self.patched)):
            if run.status not in (0, 1) or not run.passed:
                return f"{name}, pytest ended with {run.status} and {len(run.passed)} passed:\n{run.output[-3000:]}"
        if not self.patched.ours["calls"]:
            return "patched, no test called our ops"
        return None

    def __str__(self) -> str:
        passed = f"{len(self.stock.passed):6}{len(self.patched.passed):9}{len(self.differing):8}"
        return f"{passed}" + "".join(f"{self.patched.ours[what]:9}" for what in COUNTED)


COUNTED = ("fused", "experts", "calls")
HEAD = f"{'family':20}{'stock':>6}{'patched':>9}{'differ':>8}" + "".join(f"{what:>9}" for what in COUNTED)


def compare(checkout: Path, tests: list[str], options: list[str], workers: int) -> Comparison:
    parallel = ["-n", str(workers)] if workers > 1 else []
    stock, patched = (run(checkout, tests, way, options + parallel) for way in (False, True))
    suspects = sorted(stock.passed - patched.passed)
    differing = suspects
    if suspects and patched.outcomes:
        again = [run(checkout, suspects, way, []) for way in (False, True)]
        differing = sorted(again[0].passed - again[1].passed)
        patched.errors |= again[1].errors
    return Comparison(stock, patched, differing, [test for test in suspects if test not in differing])


def fused_families() -> list[str]:
    sys.path.insert(0, str(ROOT))
    from torch_moe_metal.transformers.fusing.families import RECORDS

    return sorted({name.partition(".")[0] for name in RECORDS})


def tests_of(checkout: Path, family: str) -> list[str]:
    return sorted(
        str(file.relative_to(checkout)) for file in checkout.glob(f"tests/models/{family}/test_modeling_*.py")
    )


# ------------------------------------------------------------------------------------------------ the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with transformers' tests/models in it")
    parser.add_argument("--families", nargs="+", metavar="FAMILY", help="such as qwen3_moe (default: all that we fuse)")
    parser.add_argument("-n", type=int, default=1, metavar="PROCESSES", help="for each run (default: 1)")
    parser.add_argument(
        "--pytest", default="", metavar="OPTIONS", help="more for pytest: --pytest='-k \"not compile\"'"
    )
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    if not (options.checkout / "tests" / "models").is_dir():
        parser.error(f"{options.checkout} is no checkout of transformers: it has no folder tests/models")
    known = fused_families()
    options.families = options.families or known
    if unknown := sorted(set(options.families) - set(known)):
        parser.error(f"no family that we fuse: {', '.join(unknown)}; those are {', '.join(known)}")
    if not any(tests_of(options.checkout, family) for family in options.families):
        parser.error(f"{options.checkout} has no tests of {', '.join(options.families)}")
    return options


def versions_text(checkout: Path) -> str:
    installed = importlib.metadata.version("transformers")
    source = checkout / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.*)"', source.read_text(), re.M) if source.exists() else None
    theirs = found[1] if found else "a version that is not said"
    return f"transformers {installed}, tests of {'the same' if theirs == installed else theirs}"


def reason_for(test: str) -> str | None:
    """Why a test must fail with patched models, or None if it must not."""
    return next((reason for end, reason in BY_DESIGN.items() if test.endswith(end)), None)


def describe(comparison: Comparison) -> int:
    """Prints the tests that differ. Returns the number of those without a reason."""
    wrong = [test for test in comparison.differing if reason_for(test) is None]
    for test in wrong:
        print(
            f"  {test}\n    {comparison.patched.errors.get(test, comparison.patched.outcomes.get(test, 'did not run'))}"
        )
    for test in comparison.differing:
        if reason := reason_for(test):
            print(f"  by design: {test.rpartition('::')[2]}: {reason}")
    for test in comparison.once:
        print(f"  {test}\n    not when it was run again: {comparison.patched.errors.get(test)}")
    return len(wrong)


def main() -> int:
    options = arguments()
    print(f"{versions_text(options.checkout)}\n{HEAD}   seconds", flush=True)
    missing, failed, differing = [], [], 0
    for family in options.families:
        tests = tests_of(options.checkout, family)
        if not tests:
            missing.append(family)
            continue
        print(f"{family:20}", end="", flush=True)
        start = time.monotonic()
        comparison = compare(options.checkout, tests, shlex.split(options.pytest), options.n)
        print(f"{comparison}{time.monotonic() - start:10.0f}", flush=True)
        differing += describe(comparison)
        if trouble := comparison.trouble():
            failed.append(family)
            print(f"  {trouble}", flush=True)
    if missing:
        print(f"without tests in this checkout: {', '.join(missing)}")
    if failed:
        print(f"FAILED, nothing is known of: {', '.join(failed)}")
    print(f"{differing} tests pass stock and fail patched")
    if differing:
        print(f"to see one: cd CHECKOUT; PYTHONPATH={ROOT / 'tools'} {PATCHED}=1 python -m pytest -p peer_tests TEST")
    return int(bool(differing or failed))


if __name__ == "__main__":
    sys.exit(main())

"""The CPU libraries under sanitizers: `make sanitize`. It fails on any finding.

    python tools/sanitize.py                        # all instruction sets of this machine
    python tools/sanitize.py --only avx2            # one of them
    python tools/sanitize.py --tests "-k glu" --cases 5000

For each instruction set the fast tests of the ops on the CPU and the fuzzer run with libraries built with the address
and undefined behaviour sanitizers, in build/sanitize. Before each run a planted fault must be detected in the same way.

Checks of alignment and null pointers are disabled, because GCC needs minutes per file for them. x86 and ARM allow
unaligned access, and the address sanitizer detects null pointers.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitize"
PACKAGE = FOLDER / "package"
sys.path.insert(0, str(ROOT / "tests"))
import fuzz  # noqa: E402

SANITIZERS = "address,shift,signed-integer-overflow,integer-divide-by-zero,bounds,float-cast-overflow,bool,enum"
SANITIZERS += ",unreachable,return"
TESTS = ["test_ops.py", "test_bad_input.py", "test_pytorch_rules.py", "test_routing_properties.py"]
# Compiling graphs and differentiation runs PyTorch's code for minutes, and none of ours that other tests do not run.
LEFT_OUT = "not compile and not opcheck and not transforms and not vmap"
# Requests that exceed memory fail, as they must, but this sanitizer prints a warning.
REFUSED = re.compile(r"==\d+==WARNING: AddressSanitizer failed to allocate 0x[0-9a-f]+ bytes\n*")


class SanitizeError(RuntimeError):
    pass


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def run(
    command: list[str | Path], environment: dict[str, str] | None = None, **keywords
) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], env=os.environ | (environment or {}), **keywords)


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def runtime(library: str) -> str:
    """The path of the compiler's own library."""
    found = run([compiler(), f"-print-file-name={library}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise SanitizeError(f"{compiler()} has no {library}. On Debian and Ubuntu: apt-get install g++")
    return found


# ------------------------------------------------------------------------------------------------ addresses, undefined


def build() -> None:
    """The package with instrumented libraries."""
    say("Building the CPU libraries with checks (the first time some 10 to 20 minutes)")
    log = FOLDER / "log"
    command = [sys.executable, "setup.py", "build", "--build-base", FOLDER / "base", "--build-lib", PACKAGE]
    with log.open("w") as file:
        options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = os.environ | {"MOE_METAL_SANITIZE": SANITIZERS}
        process = subprocess.Popen([str(part) for part in command], env=environment, **options)
        for line in process.stdout:
            file.write(line)
            if line.startswith("==>"):
                print(line, end="", flush=True)
    if process.wait():
        raise SanitizeError(f"The build failed; {log} ends:\n" + "\n".join(log.read_text().splitlines()[-40:]))


def checked(isa: str) -> dict[str, str]:
    """The environment for Python with instrumented libraries. Address errors are written to files, and others to
    stderr, which pytest's -s shows."""
    options = f"detect_leaks=0:halt_on_error=1:abort_on_error=1:print_stacktrace=1:log_path={reports(isa)}"
    options += ":allocator_may_return_null=1"  # requests that exceed memory fail: see REFUSED
    preload = [runtime("libasan.so"), runtime("libubsan.so"), runtime("libstdc++.so")]
    settings = {"ASAN_OPTIONS": options, "UBSAN_OPTIONS": options, "LD_PRELOAD": ":".join(preload)}
    settings |= {"PYTHONPATH": str(PACKAGE), "ATEN_CPU_CAPABILITY": isa, "MOE_METAL_DEVICES": "cpu"}
    return settings | {"PYTHONDONTWRITEBYTECODE": "1"}


def reports(isa: str) -> Path:
    return FOLDER / "reports" / isa / "report"


def findings(isa: str) -> str:
    """The findings so far, which are then deleted."""
    files = sorted(reports(isa).parent.glob("*"))
    found = REFUSED.sub("", "\n".join(file.read_text(errors="replace") for file in files))
    for file in files:
        file.unlink()
    return found


def planted_faults(isa: str) -> None:
    """A tensor that claims to be larger than its memory, read by an op; and an integer overflow."""
    overrun = """
import ctypes, torch, torch_moe_metal
assert torch_moe_metal.__file__.startswith(%r) and torch_moe_metal.cpu_isa == %r
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
memory = (ctypes.c_char * 4096).from_address(libc.malloc(4000))
x = torch.frombuffer(memory, dtype=torch.float32).view(16, 64)
torch.ops.moe_metal.%s
"""
    calls = ["glu(x, x)", "norm_add(x, x, torch.ones(64))", "route(x, top_k=3)"]
    for call in calls:
        run([sys.executable, "-c", overrun % (str(PACKAGE), isa, call)], checked(isa), cwd=PACKAGE, capture_output=True)
        if "of 4000-byte region" not in (said := findings(isa)):
            raise SanitizeError(f"{isa}: the planted overrun of {call} was not found:\n{said}")
    library = FOLDER / "planted_overflow.so"
    source = 'extern "C" int planted(int x) { return x + 2147483647; }'
    flags = [
        "-shared",
        "-fPIC",
        f"-fsanitize={SANITIZERS}",
        "-fno-sanitize-recover=all",
        "-x",
        "c++",
        "-",
        "-o",
        library,
    ]
    run([compiler(), *flags], input=source, text=True, check=True)
    planted = f"import ctypes; ctypes.CDLL({str(library)!r}).planted(1)"
    done = run([sys.executable, "-c", planted], checked(isa), capture_output=True, text=True)
    # GCC's library for undefined behaviour ignores log_path and writes to stderr.
    if "signed integer overflow" not in (said := done.stderr + findings(isa)):
        raise SanitizeError(f"{isa}: the planted overflow was not found:\n{said}")
    say(f"{isa}: {len(calls) + 1} planted faults were found")


def sanitize(isa: str, tests: str, cases: int) -> str:
    """Returns one line about what ran."""
    shutil.rmtree(reports(isa).parent, ignore_errors=True)
    reports(isa).parent.mkdir(parents=True)
    planted_faults(isa)
    start = time.monotonic()
    files = [ROOT / "tests" / name for name in TESTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        ROOT / "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    say(f"{isa}: the tests of {', '.join(TESTS)}")
    log = FOLDER / f"tests-{isa}"
    # Not in the checkout's folder, because its torch_moe_metal would be imported instead.
    with log.open("w") as file:
        done = run(
            [*command, "-k", LEFT_OUT, *shlex.split(tests), *files], checked(isa), cwd=PACKAGE, stdout=file, stderr=file
        )
    ended, output = findings(isa), log.read_text(errors="replace").splitlines()
    if ended or done.returncode:
        raise SanitizeError(f"{isa}: found in the tests, which ended with {done.returncode}:\n{ended}\n" + tail(output))
    passed = re.search(r"\d+ passed", output[-1] if output else "")
    if not passed:
        raise SanitizeError(f"{isa}: no test passed:\n" + tail(output))
    say(f"{isa}: {passed[0]} after {time.monotonic() - start:.0f} s; now the fuzzer")
    fuzzer = [sys.executable, ROOT / "tests" / "fuzz.py", "--cases", cases, "--target", isa]
    done = run(fuzzer, checked(isa), cwd=PACKAGE)
    if (ended := findings(isa)) or done.returncode:
        raise SanitizeError(f"{isa}: found by the fuzzer, which ended with {done.returncode}:\n{ended}")
    return f"{passed[0]}, {cases} fuzzed cases, nothing found; {time.monotonic() - start:.0f} s"


def tail(lines: list[str]) -> str:
    return "\n".join(lines[-60:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--tests", default="", help="more arguments of pytest")
    parser.add_argument("--cases", type=int, default=1000, help="of the fuzzer, for each instruction set")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    closing, failed = [], 0
    build()
    for name in [options.only] if options.only else fuzz.instruction_sets():
        try:
            outcome = sanitize(name, options.tests, options.cases)
        except SanitizeError as error:
            say(str(error))
            outcome, failed = "FAILED, see above", 1
        closing.append(f"{name}: {outcome}")
    for line in closing:
        say(line)
    return failed


if __name__ == "__main__":
    sys.exit(main())

"""Runs Apple's own compilers on every shader: `make shaders`, on a Mac with Xcode and its Metal toolchain. It needs no
GPU.

    python tools/compile_shaders.py                            # everything that csrc/mps/pipelines.mm compiles
    python tools/compile_shaders.py --only "linear.*=affine4"  # the libraries whose name matches
    python tools/compile_shaders.py --versions 3.2 --archs g13s --stages native

Its list is the extension's own list of kernels. Each of these stages can fail:

    offline  each library in each version of Metal, by `metal`; a warning is an error
    native   each of its kernels for each GPU generation, by `metal-tt`, with the launched number of threads: it must
             build. Code size, registers and spills are printed, also in a GitHub job's summary
    runtime  newLibraryWithSource: of this macOS, as the extension calls it; also pipelines if there is an Apple GPU

Before each stage, planted faults must be rejected: an error, a warning, a missing kernel. The tests run all of this
with a stand-in for `xcrun` (tests/tools/stand_in_metal.py), which uses our own checks.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import gpu_binary

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "shaders"), str(ROOT / "tests")]
from embed import FOLDER, shader_text  # noqa: E402

#: A version of Metal, and the first macOS that has it. The compiler must know this Mac's own version.
VERSIONS = {"3.1": 14, "3.2": 15, "4.0": 26, "4.1": 27}
#: Shaders whose libraries are empty before a version of Metal, whose features they use.
FIRST = {"tensor_ops": "4.0"}
#: The oldest supported toolchain knows the GPUs from M1 to M4; newer ones are tried too.
GENERATIONS, REQUIRED = range(13, 22), range(13, 17)
#: The maths options of pipelines.mm. Constants of headers are in the flattened text, where clang cannot see their use.
FLAGS = ["-fmetal-math-mode=safe", "-fmetal-math-fp32-functions=precise", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unused-const-variable"]
START = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = "kernel void {name}(device float* x [[buffer(0)]]) {{\n{body}}}\n"
PLANTED = {"an error": "  x[0] = nothing;\n", "a warning": "  int unused = 3;\n"}
PLANTED = {what: START + KERNEL.format(name="planted", body=body) for what, body in PLANTED.items()}
STAGES = ("native", "runtime")


class ShaderError(RuntimeError):
    pass


@dataclass(frozen=True, order=True)
class Library:
    shader: str
    macros: tuple[str, ...]

    def __str__(self) -> str:
        macros = (macro for macro in self.macros if not macro.startswith("MOE_METAL_PART_"))  # which repeat the part
        return " ".join((self.shader, *(macro.removeprefix("MOE_METAL_") for macro in macros)))


@dataclass(frozen=True)
class Kernel:
    place: int  # in the extension's list
    name: str
    threads: int  # per threadgroup


@dataclass
class Work:
    """A library and its results. A shader need not have every kernel that is listed for the library."""

    library: Library
    listed: list[Kernel]
    kernels: set[Kernel] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    newest: Path | None = None  # compiled as the newest version

    def fail(self, what: str, said: str) -> None:
        self.problems.append(f"{self.library}: {what}:\n{said.strip()}")


# ---------------------------------------------------------------------------------------------- the list


def extension_ops() -> object:
    import torch

    import torch_moe_metal  # noqa: F401

    if not hasattr(torch.ops.moe_metal, "_kernels"):  # Linux: the same sources, on the simulated Metal
        import simulated

        simulated.load()
    return torch.ops.moe_metal


def listed(lines: Iterable[str], only: str) -> list[Work]:
    """The libraries whose name matches, each with the kernels that the extension may load from it."""
    found: dict[Library, list[Kernel]] = {}
    for place, line in enumerate(lines):
        threads, name, shader, *macros = line.split()
        found.setdefault(Library(shader, tuple(macros)), []).append(Kernel(place, name, int(threads)))
    return [Work(library, kernels) for library, kernels in sorted(found.items()) if re.search(only, str(library))]


def missing_kernels(works: list[Work], versions: Collection[str] = tuple(VERSIONS)) -> Iterator[str]:
    """Families of kernels that the extension lists, but that no library of dense weights contains, in any dtype and in
    any of the compiled versions."""
    held = {family(kernel.name) for work in works for kernel in work.kernels}
    dense = [work for work in works if not any("FORMAT" in macro for macro in work.library.macros)]
    for work in dense:
        if first_version(work) not in versions:
            continue
        for name in sorted({family(kernel.name) for kernel in work.listed} - held):
            yield f"{work.library}: the extension lists {name}, which no library holds"


def first_version(work: Work) -> str:
    return FIRST.get(work.library.shader, next(iter(VERSIONS)))


def family(name: str) -> str:
    return re.sub(r"(_(float|half|bfloat)){1,2}$", "", name)


def kernel_names(text: str) -> set[str]:
    """The host names of the kernels in a text without macros."""
    named = re.findall(r'host_name\(\s*((?:"[^"]*"\s*)+)\)', text)
    plain = re.findall(r"(template\s*<[^;{}]*>\s*)?\bkernel void (\w+)\(", text)
    names = {name for template, name in plain if not template}
    return names | {"".join(re.findall(r'"([^"]*)"', name)) for name in named}


# ---------------------------------------------------------------------------------------------- Apple's tools


class Toolchain:
    """`metal` and `metal-tt`, found by xcrun."""

    def __init__(self, xcrun: str, folder: Path):
        self.xcrun, self.folder = xcrun, folder
        self.paths = {tool: self.xcrun_says("--find", tool) for tool in ("metal", "metal-tt")}
        self.environment = os.environ | {"SDKROOT": self.xcrun_says("--show-sdk-path")}

    def xcrun_says(self, *arguments: str) -> str:
        try:
            done = subprocess.run([self.xcrun, "-sdk", "macosx", *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            raise ShaderError(f"there is no {self.xcrun}: Apple's compilers come with Xcode, on a Mac") from None
        if done.returncode:
            raise ShaderError(f"xcrun {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def run(self, tool: str, *arguments: str | Path) -> str:
        """Returns its output; raises with its messages if it fails or warns."""
        command = [self.paths[tool], *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            raise ShaderError(done.stderr.strip() or done.stdout.strip() or f"{tool} ended with {done.returncode}")
        return done.stdout

    def version(self) -> str:
        return self.run("metal", "--version").splitlines()[0]

    def source(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.metal"
        path.write_text(text)
        return path

    def compile(self, source: Path, version: str, target: Path, macros: Iterable[str] = ()) -> Path:
        language = [f"-std=metal{version}", f"-mmacosx-version-min={VERSIONS[version]}.0"]
        self.run("metal", *language, *FLAGS, *(f"-D{macro}" for macro in macros), "-o", target, source)
        return target

    def names(self, source: Path, version: str, macros: Iterable[str]) -> set[str]:
        """The kernels in a source after preprocessing, without Apple's headers, one of which defines __HAVE_TENSOR__
        from Metal 4 on."""
        macros = [*macros, "__HAVE_TENSOR__=1"] if float(version) >= 4 else macros
        text = re.sub(r"^#include <.*$", "", source.read_text(), flags=re.MULTILINE)
        bare = self.folder / f"{source.stem}.bare.metal"
        bare.write_text(text)
        return kernel_names(self.run("metal", f"-std=metal{version}", "-E", "-P", *map("-D{}".format, macros), bare))

    def translate(self, library: Path, kernel: str, threads: int, arch: str) -> gpu_binary.Figures:
        """A kernel compiled alone, because figures have no names."""
        pipeline = {"compute_function": kernel, "max_total_threads_per_threadgroup": threads}
        pipeline["threadgroup_size_is_multiple_of_thread_execution_width"] = True
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            script, target = Path(folder, "pipeline.mtlp-json"), Path(folder, "native.metallib")
            script.write_text(json.dumps({"pipelines": {"compute_pipelines": [pipeline]}}))
            self.run("metal-tt", "-arch", f"applegpu_{arch}", "-o", target, script, library)
            return gpu_binary.figures(target.read_bytes())


def known_versions(tools: Toolchain, wanted: list[str]) -> list[str]:
    """The versions that this compiler knows. It must know that of its own macOS and all older ones."""
    from torch_moe_metal import macos

    own, known = float(macos.version() or 15), []
    source = tools.source("version", START + KERNEL.format(name="version", body="  x[0] = 1;\n"))
    for version in wanted:
        try:
            tools.compile(source, version, tools.folder / "version.metallib")
            known.append(version)
        except ShaderError as error:
            if VERSIONS[version] <= own or "invalid value" not in str(error):
                raise ShaderError(f"Metal {version} does not compile here:\n{error}") from None
            print(f"Metal {version}: not known to this compiler")
    return known


def refused(what: str, call: Callable[[], object]) -> None:
    """A planted fault, which must be rejected."""
    try:
        call()
    except RuntimeError:
        return
    raise ShaderError(f"{what} was planted, and accepted: this check cannot detect it, so its results prove nothing")


# ---------------------------------------------------------------------------------------------- offline


def offline(tools: Toolchain, works: list[Work], versions: list[str], pool: ThreadPoolExecutor) -> None:
    for what, text in PLANTED.items():
        source = tools.source("planted", text)
        for version in versions:
            target = tools.folder / "planted.metallib"
            refused(f"{what} in Metal {version}", lambda: tools.compile(source, version, target))  # noqa: B023
    shaders = {work.library.shader for work in works}
    sources = {name: tools.source(name, shader_text(FOLDER / f"{name}.metal")) for name in shaders}
    list(pool.map(lambda work: compile_versions(tools, work, sources[work.library.shader], versions), works))


def compile_versions(tools: Toolchain, work: Work, source: Path, versions: list[str]) -> None:
    for version in versions:
        target = tools.folder / (re.sub(r"\W+", "-", str(work.library)) + ".metallib")
        try:
            names = tools.names(source, version, work.library.macros)
            if unlisted := names - {kernel.name for kernel in work.listed}:
                work.fail(f"Metal {version}", f"it holds {', '.join(sorted(unlisted))}, which is never requested")
            if not names:  # a part without code for this dtype or format
                continue
            work.newest = tools.compile(source, version, target, work.library.macros)
            work.kernels |= {kernel for kernel in work.listed if kernel.name in names}
        except ShaderError as error:
            work.fail(f"Metal {version}", str(error))


# ---------------------------------------------------------------------------------------------- native


def known_archs(tools: Toolchain, library: Path, wanted: list[str]) -> list[str]:
    """The larger chips of each generation, or the smallest, as far as this toolchain knows them."""
    known = []
    for generation in GENERATIONS:
        names = [f"g{generation}{size}" for size in "sg"]
        for name in names:
            try:
                tools.translate(library, "planted", 32, name)
                known.append(name)
                break
            except ShaderError as error:
                why = error
        else:
            if generation in REQUIRED:
                raise ShaderError(f"metal-tt translates for none of {', '.join(names)}: {why}")
    return [name for name in known if not wanted or name in wanted]


def native(tools: Toolchain, works: list[Work], version: str, archs: list[str], pool: ThreadPoolExecutor) -> list[str]:
    """Returns the lines of a table."""
    floats = {count: [f"x[{i} * 32 + int(x[0])]" for i in range(count)] for count in (8, 40)}
    kernels = [START, KERNEL.format(name="planted", body="  x[0] = 1;\n")]
    kernels += [held(f"holds_{count}", values) for count, values in floats.items()]
    source = tools.source("probes", "".join(kernels))
    probes = tools.compile(source, version, tools.folder / "probes.metallib")
    archs = known_archs(tools, probes, archs)
    refused("a kernel that is not there", lambda: tools.translate(probes, "missing", 32, archs[0]))
    few, many = (tools.translate(probes, f"holds_{count}", 32, archs[0]) for count in floats)
    readable = 8 <= few.registers < many.registers <= 256 and not few.spilled
    calls = [(work, kernel, arch) for work in works if work.newest for kernel in work.kernels for arch in archs]
    found = [each for each in pool.map(lambda call: translated(tools, *call), calls) if each]
    rows = ["| shader | GPU | kernels | code, KB | largest | registers | spill |", "|---|---|---|---|---|---|---|"]
    for shader, arch in sorted({(shader, arch) for shader, arch, _ in found}):
        rows.append(row(shader, arch, [figures for *key, figures in found if key == [shader, arch]], readable))
    if not readable:
        rows.append(
            f"\nRegisters are omitted: 8 numbers in {few.registers} and 40 in {many.registers} are implausible."
        )
    return rows


def held(name: str, values: list[str]) -> str:
    """A kernel that holds so many values at once."""
    count = len(values)
    body = "".join(f"  float v{i} = {value};\n" for i, value in enumerate(values))
    body += "".join(f"  v{i} = fma(v{i}, v{(i + 5) % count}, v{(i + 7) % count});\n" for i in range(count)) * 2
    return KERNEL.format(name=name, body=body + f"  x[0] = {' + '.join(f'v{i}' for i in range(count))};\n")


def translated(tools: Toolchain, work: Work, kernel: Kernel, arch: str) -> tuple | None:
    try:
        return work.library.shader, arch, tools.translate(work.newest, kernel.name, kernel.threads, arch)
    except (ShaderError, gpu_binary.BinaryError) as error:
        work.fail(f"{kernel.name}, {kernel.threads} threads, {arch}", str(error))
        return None


def row(shader: str, arch: str, figures: list[gpu_binary.Figures], readable: bool) -> str:
    code, spilled = [each.code for each in figures], [each.spilled for each in figures if each.spilled]
    registers = f"{max(each.registers for each in figures)} | {len(spilled)}, {max(spilled, default=0)} bytes"
    cells = (shader, arch, len(figures), f"{sum(code) / 1024:.0f}", f"{max(code) / 1024:.1f}")
    return f"| {' | '.join(map(str, cells))} | {registers if readable else '- | -'} |"


# ---------------------------------------------------------------------------------------------- runtime


def runtime(ops: object, works: list[Work], pool: ThreadPoolExecutor) -> str:
    """Returns what was compiled, of the libraries that this macOS's Metal has kernels for."""
    from torch_moe_metal import macos

    own = float(macos.version() or max(VERSIONS.values()))
    works = [work for work in works if work.kernels]
    newest = max((VERSIONS[first_version(work)] for work in works), default=0)
    works = [work for work in works if VERSIONS[first_version(work)] <= own]
    if not works:
        needed = f": those that match need macOS {newest}" if newest else ", since no library has kernels"
        return f"nothing is compiled by this macOS{needed}"
    some = next(iter(works[0].kernels))
    refused("an error at run time", lambda: ops._compile(some.place, PLANTED["an error"]))
    made: Counter[str] = Counter()

    def compile(work: Work) -> None:
        for kernel in sorted(work.kernels, key=lambda kernel: kernel.place):
            try:
                made["pipelines"] += ops._compile(kernel.place, "")
            except RuntimeError as error:
                work.fail(f"{kernel.name} at run time", str(error))
        made["libraries"] += 1

    list(pool.map(compile, works))
    return f"{made['libraries']} libraries and {made['pipelines']} pipelines by this macOS"


# ---------------------------------------------------------------------------------------------- all of it


def summary(text: str) -> None:
    print(text)
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a") as file:
            file.write(text + "\n")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression of libraries")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=[*VERSIONS])
    parser.add_argument("--archs", nargs="+", default=[], help="such as g13s; one of each generation if not given")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES, help="in addition to offline")
    parser.add_argument("--xcrun", default="xcrun", help="which finds Apple's tools")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    ops = extension_ops()
    works = listed(ops._kernels(), options.only)
    if not works:
        raise ShaderError(f"no library's name matches {options.only}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        tools = Toolchain(options.xcrun, Path(folder))
        summary(f"## Shaders, compiled by {tools.version()}")
        versions = known_versions(tools, options.versions)
        offline(tools, works, versions, pool)
        problems = [] if options.only else [*missing_kernels(works, versions)]
        libraries = [work for work in works if work.kernels]
        summary(f"{len(libraries)} libraries as Metal {', '.join(versions)}")
        if "native" in options.stages and not any(work.problems for work in works):
            summary("\n".join(native(tools, libraries, versions[-1], options.archs, pool)))
        if "runtime" in options.stages:
            summary(runtime(ops, libraries, pool))
    problems += [problem for work in works for problem in work.problems]
    if problems:
        raise ShaderError("\n\n".join([*problems, f"{len(problems)} problems"]))


if __name__ == "__main__":
    try:
        main()
    except ShaderError as error:
        summary(f"FAILED\n```\n{error}\n```")
        sys.exit(1)

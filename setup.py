"""Builds the C++ side: `_C` (schemas, and on macOS the MPS backend) and one `_cpu_<isa>` library per instruction set.

The CPU kernels are compiled once per instruction set, into libraries of their own: a wheel then runs on every machine
of its architecture and is fast on each, and no AVX-512 code can leak into code that all machines run.

While it compiles it says how far it is, in lines that begin with "==>". `make` shows them. `pip install` does so with
`-v` only: without it pip holds back whatever a build says.
"""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

sys.path.insert(0, str(Path(__file__).parent / "shaders"))
from embed import write_header

ROOT = Path(__file__).parent
os.chdir(ROOT)

# Warnings about ATen's headers; not every compiler knows each.
UNFOUNDED = ["unknown-warning-option", "unknown-pragmas", "uninitialized", "maybe-uninitialized", "psabi"]
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", *(f"-Wno-{name}" for name in UNFOUNDED)]
# ATen's name of each instruction set, which makes at::vec choose its vector type, and the compiler's flags.
CPU_ISAS = {
    "avx512": "AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c",
    "avx2": "AVX2 -mavx2 -mfma -mf16c",
    "default": "DEFAULT",
}
MACOS = "14.0"  # the oldest that the Metal code is written for
SECONDS_PER_FILE = 12  # of one core, measured with GCC 12 on a shared virtual machine
OBJECTS = ROOT / "build" / "objects"
if sanitizers := os.environ.get("MOE_METAL_SANITIZE"):  # tools/sanitize.py: -fsanitize of these
    CXX_FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    OBJECTS = ROOT / "build" / "sanitize" / "objects"
if platform.machine() not in ("x86_64", "AMD64"):
    CPU_ISAS = {"default": CPU_ISAS["default"]}  # NEON and SVE: at::vec follows the compiler's own macros


def sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob(pattern))


def extension(name: str, files: list[str], flags: list[str], link: list[str] = []) -> CppExtension:  # noqa: B006
    return CppExtension(
        f"torch_moe_metal.{name}",
        files,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "shaders"), str(ROOT / "build")],
        extra_compile_args=CXX_FLAGS + flags,
        extra_link_args=link + [flag for flag in CXX_FLAGS if flag.startswith("-fsanitize")],
        py_limited_api=True,
    )


def extensions() -> list[CppExtension]:
    # at::parallel_for is a header: without OpenMP's flag it would run on one thread. Its runtime is torch's own.
    main, flags, link = sources("*.cpp"), ["-fopenmp"], []
    if sys.platform == "darwin":
        write_header(ROOT / "build" / "shader_texts.h")
        main += sources("mps/*.mm")
        flags = [f"-mmacosx-version-min={MACOS}"]
        link = [*flags, "-framework", "Metal", "-framework", "Foundation"]
    cpu = []
    for isa, options in CPU_ISAS.items():
        capability, *march = options.split()
        macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        cpu.append(extension(f"_cpu_{isa}", sources("cpu/*.cpp"), macros + march + flags))
    return [extension("_C", main, flags, link), *cpu]


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


class BuildEach(BuildExtension):
    def build_extensions(self) -> None:
        files, cores = sum(len(ext.sources) for ext in self.extensions), os.cpu_count() or 1
        wish = os.environ.get("MAX_JOBS", "")
        jobs = int(wish) if wish.isdigit() else cores
        minutes = files * SECONDS_PER_FILE / min(jobs, cores, files) / 60
        say(f"Building for torch {MINOR}: {files} files in {len(self.extensions)} libraries, {jobs} at a time")
        say(f"CPU kernels for {', '.join(CPU_ISAS)}: the same files once for each")
        say(f"The first time some {max(minutes, 1):.0f} minutes; what is compiled is not compiled again")
        # A Mac's Python may be made for both architectures; torch is not.
        for name, command in vars(self.compiler).items():
            if isinstance(command, list) and "-arch" in command:
                setattr(self.compiler, name, " ".join(command).replace("-arch x86_64", "").split())
        super().build_extensions()

    def build_extension(self, ext) -> None:
        """Objects in one place for every kind of build (editable, wheel, in place), so that the second one is quick,
        and in a folder for each library: the CPU libraries have the same sources and differ by their flags."""
        self.build_temp = str(OBJECTS / ext.name)
        start, place = time.monotonic(), f"{self.extensions.index(ext) + 1} of {len(self.extensions)}"
        say(f"{ext.name}, {place} (files: {len(ext.sources)})")
        super().build_extension(ext)
        say(f"{ext.name}, {place}: ready after {time.monotonic() - start:.0f} s")


def version() -> str:
    """The package's own, which stands in its __init__.py, and the torch it fits: of several wheels with the same
    version pip would look at one only."""
    text = (ROOT / "torch_moe_metal" / "__init__.py").read_text()
    (literal,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return f"{literal}+torch{MINOR}"


def project_urls() -> dict[str, str]:
    """Wherever this checkout's repository is, told by GitHub's machines or by git; none without one on GitHub."""
    address = os.environ.get("GITHUB_REPOSITORY", "")
    if not address and (ROOT / ".git").exists():
        origin = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
        address = "".join(re.findall(r"github\.com[:/](.+?)(?:\.git)?$", origin.strip()))
    home = f"https://github.com/{address}"
    pages = {"Homepage": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    return {name: home + page for name, page in pages.items()} if address else {}


MINOR = ".".join(torch.__version__.split(".")[:2])
WHEEL = {"py_limited_api": "cp310"}
if sys.platform == "darwin":  # whatever this machine and its Python were made for
    WHEEL["plat_name"] = f"macosx-{MACOS}-arm64"
setup(
    version=version(),
    project_urls=project_urls(),
    ext_modules=extensions(),
    # C++ symbols and layouts change with torch's minor version, so a wheel fits just the one it was built against.
    install_requires=[f"torch=={MINOR}.*"],
    cmdclass={"build_ext": BuildEach.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": WHEEL},
)

"""Builds the C++ side: `_C` (schemas, and on macOS the MPS backend) and one `_cpu_<isa>` library per instruction set.

The CPU kernels are compiled once per instruction set, into libraries of their own: a wheel then runs on every machine
of its architecture and is fast on each, and no AVX-512 code can leak into code that all machines run.
"""

import os
import platform
import sys
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
        extra_link_args=link,
        py_limited_api=True,
    )


def extensions() -> list[CppExtension]:
    # at::parallel_for is a header: without OpenMP's flag it would run on one thread. Its runtime is torch's own.
    main, flags, link = sources("*.cpp"), ["-fopenmp"], []
    if sys.platform == "darwin":
        write_header(ROOT / "build" / "shader_texts.h")
        main += sources("mps/*.mm")
        flags = ["-mmacosx-version-min=14.0"]
        link = ["-framework", "Metal", "-framework", "Foundation"]
    cpu = []
    for isa, options in CPU_ISAS.items():
        capability, *march = options.split()
        macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        cpu.append(extension(f"_cpu_{isa}", sources("cpu/*.cpp"), macros + march + flags))
    return [extension("_C", main, flags, link), *cpu]


class BuildEach(BuildExtension):
    def build_extension(self, ext) -> None:
        """Objects in one place for every kind of build (editable, wheel, in place), so that the second one is quick,
        and in a folder for each library: the CPU libraries have the same sources and differ by their flags."""
        self.build_temp = str(ROOT / "build" / "objects" / ext.name)
        super().build_extension(ext)


major, minor = torch.__version__.split(".")[:2]
setup(
    ext_modules=extensions(),
    # C++ symbols and layouts change with torch's minor version, so a wheel fits just the one it was built against.
    install_requires=[f"torch=={major}.{minor}.*"],
    cmdclass={"build_ext": BuildEach.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

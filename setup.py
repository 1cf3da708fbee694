"""Builds the C++ extension: `_C` (schemas, and on macOS the MPS backend) and one `_cpu_<isa>` library per instruction
set.

The CPU kernels are compiled once per instruction set, into separate libraries: a wheel then runs on every machine of
its architecture, uses the best one, and no AVX-512 code can leak into code that all machines run.

MOE_METAL_CPU chooses the instruction sets: `all` (the default of a wheel, which other machines install), `native` (the
best one of this machine; the default of an editable build) or a list such as `avx512,avx2`. `default` is always built.
"""

import os
import platform
import re
import runpy
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  pip asks for the requirements before it looks at requires-python
    raise SystemExit(f"torch_moe_metal needs Python 3.11 or newer; this is {platform.python_version()}.")
try:
    import torch
except ImportError:
    raise SystemExit(
        f"torch_moe_metal is compiled for the torch that it will run with, and {sys.executable} has none. Run "
        "`pip install torch` first, then `pip install --no-build-isolation .`"
    ) from None
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
MINOR = ".".join(torch.__version__.split(".")[:2])
if sys.platform == "darwin" and tuple(map(int, MINOR.split("."))) < (2, 14):  # its own operations on mps are wrong
    raise SystemExit(f"torch_moe_metal needs torch 2.14 or newer on a Mac; this is {MINOR}: pip install 'torch>=2.14'")
MACOS = "14.0"  # the oldest that the Metal code is written for

# Warnings about ATen's headers; not every compiler knows each.
UNFOUNDED = ["unknown-warning-option", "unknown-pragmas", "uninitialized", "maybe-uninitialized", "psabi"]
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", *(f"-Wno-{name}" for name in UNFOUNDED)]
# ATen's name of each instruction set, which makes at::vec choose its vector type, and the compiler's flags.
CPU_ISAS = {
    "avx512": "AVX512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c",
    "avx2": "AVX2 -mavx2 -mfma -mf16c",
    "default": "DEFAULT",
}
# Objects of another torch are never reused, and editable builds and wheels share theirs.
OBJECTS = ROOT / "build" / "objects" / f"torch-{torch.__version__}"
if sanitizers := os.environ.get("MOE_METAL_SANITIZE"):  # tools/sanitize.py: -fsanitize of these
    CXX_FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    OBJECTS = ROOT / "build" / "sanitize" / "objects"
if platform.machine() not in ("x86_64", "AMD64"):
    CPU_ISAS = {"default": CPU_ISAS["default"]}  # NEON and SVE: at::vec follows the compiler's own macros


if re.search("build-env|builds-v", torch.__file__):  # where pip, `build` and uv install what an isolated build needs
    print(
        f"==> This isolated build is for torch {MINOR}.*, the newest, and installing it installs that torch. To build "
        "for the torch that you have: pip install --no-build-isolation .",
        file=sys.stderr,
    )


def sources(pattern: str) -> list[str]:
    """Files that take long first, so that both cores finish together: the readers of formats, then the largest."""
    found = sorted(
        (ROOT / "csrc").glob(pattern), key=lambda path: (path.parent.name != "formats", -path.stat().st_size, path)
    )
    return [str(path.relative_to(ROOT)) for path in found]


def extension(name: str, files: list[str], flags: list[str], link: list[str] = []) -> CppExtension:  # noqa: B006
    return CppExtension(
        f"torch_moe_metal.{name}",
        files,
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "shaders"), str(ROOT / "build")],
        extra_compile_args=CXX_FLAGS + flags,
        extra_link_args=link + [flag for flag in CXX_FLAGS if flag.startswith("-fsanitize")],
        py_limited_api=True,
    )


def openmp_on_macos() -> list[str]:
    """Apple's driver has no -fopenmp, but the compiler itself supports it. torch's wheel has omp.h among its headers;
    for other builds of torch it is in OMP_PREFIX, in the conda environment, or in Homebrew's folder."""
    places = [os.environ.get("OMP_PREFIX"), Path(torch.__file__).parent, sys.prefix, "/opt/homebrew/opt/libomp"]
    headers = [Path(place, "include") for place in places if place]
    found = [folder for folder in headers if (folder / "omp.h").exists()]
    return ["-Xclang", "-fopenmp", *(f"-I{folder}" for folder in found[:1])]


def extensions() -> list[CppExtension]:
    # at::parallel_for is a header: without OpenMP's flag it would run on one thread. Its runtime is torch's own.
    main, flags, link, frameworks = sources("*.cpp"), ["-fopenmp"], [], []
    if sys.platform == "darwin":
        runpy.run_path(str(ROOT / "shaders" / "embed.py"))["write_header"](ROOT / "build" / "shader_texts.h")
        main += sources("mps/*.mm")
        flags = [f"-mmacosx-version-min={MACOS}", *openmp_on_macos()]
        # libomp is not linked, because a second copy of it would have a second pool of threads: dyld finds its
        # functions in the copy that torch has loaded (in a wheel torch/lib, in conda the environment's lib).
        link = [flags[0], "-Wl,-undefined,dynamic_lookup"]
        frameworks = ["-framework", "Metal", "-framework", "Foundation"]
    cpu = []
    for isa, options in CPU_ISAS.items():
        capability, *march = options.split()
        macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
        files = [file for file in sources("cpu/**/*.cpp") if isa == "avx512" or "/x86/" not in file]
        cpu.append(extension(f"_cpu_{isa}", files, macros + march + flags, link))
    return [extension("_C", main, flags, link + frameworks), *cpu]


def instruction_sets(default: str) -> set[str]:
    """The instruction sets that MOE_METAL_CPU chooses."""
    names = (os.environ.get("MOE_METAL_CPU") or default).lower().replace(",", " ").split()
    if unknown := set(names) - {"all", "native", *CPU_ISAS}:
        known = ", ".join(CPU_ISAS)
        raise SystemExit(f"MOE_METAL_CPU: expected all, native or a list of {known}; got {', '.join(sorted(unknown))}")
    native = torch.backends.cpu.get_cpu_capability().lower() if "native" in names else "default"
    return set(CPU_ISAS) if "all" in names else {*names, native, "default"} & set(CPU_ISAS)


class BuildEach(BuildExtension):
    def run(self) -> None:
        in_checkout = self.inplace or self.editable_mode
        chosen = {f"torch_moe_metal._cpu_{isa}" for isa in instruction_sets("native" if in_checkout else "all")}
        left_out = [ext for ext in self.extensions if "_cpu_" in ext.name and ext.name not in chosen]
        self.extensions = [ext for ext in self.extensions if ext not in left_out]
        if in_checkout:  # an old library there would be loaded
            for ext in left_out:
                (ROOT / (ext.name.replace(".", "/") + ".so")).unlink(missing_ok=True)
        super().run()

    def build_extensions(self) -> None:
        # A Mac's Python may support both architectures; torch does not.
        for name, command in vars(self.compiler).items():
            if isinstance(command, list) and "-arch" in command:
                setattr(self.compiler, name, " ".join(command).replace("-arch x86_64", "").split())
        super().build_extensions()

    def build_extension(self, ext) -> None:
        """All kinds of builds (editable, wheel, in-place) share objects, so that later builds are fast. Each library
        has its own folder, because the CPU libraries have the same sources and differ by their flags."""
        place = f"{self.extensions.index(ext) + 1} of {len(self.extensions)}"
        print(f"==> Compiling {ext.name} for torch {MINOR} (library {place}, files: {len(ext.sources)})", flush=True)
        if ext is self.extensions[0]:
            self.start_precompiling()
        self.build_temp = str(OBJECTS / ext.name)
        if ext.name in self.headers:
            ext.extra_compile_args += ["-include", self.headers[ext.name].result()]
        super().build_extension(ext)

    def swig_sources(self, sources, ext):
        """setuptools has sorted the files by name; sources() has put those that take long first."""
        return super().swig_sources(ext.sources, ext)

    def start_precompiling(self) -> None:
        """Precompile the headers of all CPU libraries in parallel, while `_C` is compiled: each is one file. Not with a
        compiler cache, which would not cache the files that include the result."""
        self.headers = {}
        if self.use_ninja and not (shutil.which("ccache") or shutil.which("sccache")):
            pool = ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1))
            cpu = [ext for ext in self.extensions if "_cpu_" in ext.name]
            self.headers = {ext.name: pool.submit(self.precompile, ext) for ext in cpu}

    def precompile(self, ext) -> str:
        """PyTorch's headers, compiled once per library, because reading them takes most of the time of a small file.
        Returns the header to include."""
        header = OBJECTS / ext.name / "precompiled" / "torch_headers.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / "csrc" / "cpu" / "torch_headers.h").read_text()
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
        if ".h" not in self.compiler.src_extensions:
            self.compiler.src_extensions.append(".h")
        # The same command as for the files, because all flags must be equal; compilers look for the result in *.h.gch.
        (compiled,) = self.compiler.compile(
            ["csrc/cpu/torch_headers.h"], str(header.parent), include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )  # fmt: skip
        found = header.with_suffix(".h.gch")
        found.unlink(missing_ok=True)
        found.symlink_to(compiled)
        return str(header)


def version() -> str:
    """The version in the package's __init__.py, and the torch it is for: pip would consider only one of several wheels
    with the same version."""
    text = (ROOT / "torch_moe_metal" / "__init__.py").read_text()
    (literal,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return f"{literal}+torch{MINOR}"


WHEEL = {"py_limited_api": "cp311"}
if sys.platform == "darwin":  # also for a universal Python
    WHEEL["plat_name"] = f"macosx-{MACOS}-arm64"
setup(
    version=version(),
    ext_modules=extensions(),
    # C++ symbols and layouts change with torch's minor version, so a wheel only fits the one it was built for.
    install_requires=[f"torch=={MINOR}.*"],
    cmdclass={"build_ext": BuildEach.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": WHEEL},
)

"""tools/compile_shaders.py with a stand-in for Apple's compilers: it compiles everything, and it can fail."""

import sys
from pathlib import Path

import pytest
import stand_in_metal
import torch

import compile_shaders
import embed
import gpu_binary
from compile_shaders import ShaderError
from conftest import DEVICES, SIMULATED

pytestmark = pytest.mark.skipif(
    not SIMULATED or "mps" not in DEVICES, reason="the stand-in uses the checks of the simulated Metal"
)
GLU = "^glu DTYPE=0$"


@pytest.fixture
def xcrun(tmp_path: Path) -> str:
    """The stand-in, as xcrun finds it."""
    tool = f"exec {sys.executable} {stand_in_metal.HERE}"
    script = f'case "$3" in --find) echo {tmp_path}/$4;; --show-sdk-path) echo {tmp_path};; *) exit 1;; esac'
    for name, line in {"xcrun": script, "metal": f'{tool} metal "$@"', "metal-tt": f'{tool} metal-tt "$@"'}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return str(tmp_path / "xcrun")


@pytest.fixture
def shader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A changed shaders/glu.metal for this test."""
    path = tmp_path / "shaders" / "glu.metal"
    path.parent.mkdir()
    path.write_text(compile_shaders.shader_text(compile_shaders.FOLDER / path.name))
    monkeypatch.setattr(compile_shaders, "FOLDER", path.parent)
    return path


def run(xcrun: str, *arguments: str, only: str = GLU) -> None:
    compile_shaders.main(["--xcrun", xcrun, "--only", only, *arguments])


def test_one_of_all_libraries(xcrun: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every version and GPU generation that the compiler knows, and Metal itself."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    run(xcrun)
    title, libraries, *table, runtime = (tmp_path / "summary").read_text().splitlines()
    assert title.endswith("stand-in for Apple metal version 32023.404")
    assert libraries == "1 libraries as Metal 3.1, 3.2, 4.0"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert rows == [
        ["glu", arch, "1", "0", "0.3", "24", "0, 0 bytes"] for arch in ("g13s", "g14s", "g15s", "g16s", "g17g")
    ]
    assert runtime == "1 libraries and 1 pipelines by this macOS"


def test_the_list_is_that_of_the_extension() -> None:
    """Every kernel exists, with the threads of its pipeline and the macros of its library."""
    works = compile_shaders.listed(torch.ops.moe_metal._kernels(), "")
    libraries = {str(work.library): {(k.name, k.threads) for k in work.listed} for work in works}
    assert ("glu_float", 256) in libraries["glu DTYPE=0"]
    assert {("norm_add_half", 512), ("norm_add_half", 1024)} <= libraries["norm_add DTYPE=1"]
    assert ("experts_sort", 1024) in libraries["experts_slots PART=sort"]
    formats = {name.rpartition("FORMAT=")[2] for name in libraries if name.startswith("linear") and "FORMAT" in name}
    assert formats == {name for name in embed.FORMATS if name != "dense"}
    shaders = {path.stem for path in compile_shaders.FOLDER.glob("*.metal")}
    assert {work.library.shader for work in works} == shaders


def test_libraries_contain_the_requested_kernels() -> None:
    """And no others, which would be compiled for nothing. For dense weights."""
    from metal_sim.engine import translate

    works = compile_shaders.listed(torch.ops.moe_metal._kernels(), r"^(?!.*FORMAT)")
    texts = {work.library.shader: embed.shader_text(embed.FOLDER / f"{work.library.shader}.metal") for work in works}
    for work in works:
        version = int(float(compile_shaders.first_version(work)) * 100)
        text = translate.preprocess(texts[work.library.shader], version, work.library.macros)
        names = compile_shaders.kernel_names(text)
        work.kernels = {kernel for kernel in work.listed if kernel.name in names}
        assert names <= {kernel.name for kernel in work.listed}, str(work.library)
    assert not [*compile_shaders.missing_kernels(works)]


@pytest.mark.parametrize(
    ("line", "said"),
    [("  y[0] = gate[0];", "undeclared identifier 'y'"), ("  int unused = 3;", "unused variable 'unused'")],
)
def test_an_error_and_a_warning_of_ours(
    line: str, said: str, xcrun: str, shader: Path, capsys: pytest.CaptureFixture
) -> None:
    shader.write_text(f"{shader.read_text()}\nkernel void more(device float* x [[buffer(0)]]) {{\n{line}\n}}\n")
    with pytest.raises(ShaderError) as failed:
        run(xcrun, "--versions", "3.1", "--stages")
    assert said in str(failed.value) and "glu DTYPE=0: Metal 3.1:" in str(failed.value)


def test_unused_kernels_are_detected(xcrun: str, shader: Path) -> None:
    shader.write_text(f"{shader.read_text()}\nkernel void more(device float* x [[buffer(0)]]) {{\n  x[0] = 1;\n}}\n")
    with pytest.raises(ShaderError, match="it holds more, which is never requested"):
        run(xcrun, "--versions", "3.1", "--stages")


def test_missing_kernels_are_detected() -> None:
    library = compile_shaders.Library("glu", ("MOE_METAL_DTYPE=0",))
    kernels = [compile_shaders.Kernel(i, f"{name}_float", 32) for i, name in enumerate(("glu", "gone"))]
    work = compile_shaders.Work(library, kernels, kernels={kernels[0]})
    assert [*compile_shaders.missing_kernels([work])] == [
        "glu DTYPE=0: the extension lists gone, which no library holds"
    ]


@pytest.mark.parametrize(
    ("tool", "accepts", "planted"),
    [
        ("metal", "planted.metal", "an error in Metal 3.1 was planted"),
        ("metal-tt", "missing", "a kernel that is not there was planted"),
    ],
)
def test_a_compiler_that_accepts_anything(tool: str, accepts: str, planted: str, xcrun: str, tmp_path: Path) -> None:
    """Its results for our shaders would be meaningless."""
    path = tmp_path / tool
    (tmp_path / "any").write_bytes(stand_in_metal.binary(16, 8, 0))
    asks = f'grep -q {accepts} "$5"' if tool == "metal-tt" else f'echo "$*" | grep -q {accepts}'
    done = f'cp {tmp_path}/any "$4"' if tool == "metal-tt" else "true"
    path.write_text(path.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\nif {asks}; then {done}; exit 0; fi\n"))
    with pytest.raises(ShaderError, match=planted):
        run(xcrun, "--versions", "3.1", "--stages", "native", "--archs", "g13s")


TENSORS = "^tensor_ops PART=tiles16 DTYPE=2$"


def test_metal_4_has_tensors_and_metal_3_an_empty_library(xcrun: str, capsys: pytest.CaptureFixture) -> None:
    """With a toolchain or a macOS that has no Metal 4 nothing is missed."""
    run(xcrun, "--stages", only=TENSORS)
    assert "1 libraries as Metal 3.1, 3.2, 4.0" in capsys.readouterr().out
    run(xcrun, "--versions", "3.2", "--stages", only=TENSORS)
    assert "0 libraries as Metal 3.2" in capsys.readouterr().out
    works = compile_shaders.listed(torch.ops.moe_metal._kernels(), TENSORS)
    assert not [*compile_shaders.missing_kernels(works, ["3.1", "3.2"])]
    assert len([*compile_shaders.missing_kernels(works, ["3.2", "4.0"])]) == 1


def test_an_older_macos_does_not_compile_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_moe_metal import macos

    ops = torch.ops.moe_metal
    works = compile_shaders.listed(ops._kernels(), f"{TENSORS}|{GLU}")
    for work in works:
        work.kernels = {work.listed[0]}
    for version, libraries in (("15.5", 1), ("26.3", 2)):
        monkeypatch.setattr(macos, "version", lambda version=version: version)
        with compile_shaders.ThreadPoolExecutor(1) as pool:
            assert compile_shaders.runtime(ops, works, pool).startswith(f"{libraries} libraries")


@pytest.mark.parametrize(
    ("versions", "said"),
    [(("4.0",), "nothing is compiled by this macOS: those that match need macOS 26"),
     (("3.2",), "nothing is compiled by this macOS, since no library has kernels")],
)  # fmt: skip
def test_only_tensors_on_an_older_macos(
    versions: tuple, said: str, xcrun: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A newer toolchain still compiles them offline."""
    monkeypatch.setattr("torch_moe_metal.macos.version", lambda: "15.5")
    run(xcrun, "--versions", *versions, "--stages", "native", "runtime", "--archs", "g13s", only=TENSORS)
    out = capsys.readouterr().out
    assert said in out and ("| tensor_ops | g13s |" in out) == (versions == ("4.0",))


def test_planted_error_at_run_time(xcrun: str) -> None:
    class Accepts:
        _kernels = staticmethod(torch.ops.moe_metal._kernels)
        _compile = staticmethod(lambda place, more: True)

    works = compile_shaders.listed(Accepts._kernels(), GLU)
    works[0].kernels = {works[0].listed[0]}
    with pytest.raises(ShaderError, match="an error at run time was planted, and accepted"):
        compile_shaders.runtime(Accepts, works, None)


def test_errors_of_metal_itself() -> None:
    works = compile_shaders.listed(torch.ops.moe_metal._kernels(), GLU)
    works[0].kernels = {kernel for kernel in works[0].listed if kernel.name in ("glu_float", "glu_float_half")}
    with compile_shaders.ThreadPoolExecutor(2) as pool:
        assert compile_shaders.runtime(torch.ops.moe_metal, works, pool).startswith("1 libraries and 1 pipelines")
    assert len(works[0].problems) == 1 and "has no kernel glu_float_half" in works[0].problems[0]


def test_unknown_language_version_raises(xcrun: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch_moe_metal.macos.version", lambda: "27.0")
    with pytest.raises(ShaderError, match=r"Metal 4\.1 does not compile here:\nerror: invalid value 'metal4\.1'"):
        compile_shaders.known_versions(compile_shaders.Toolchain(xcrun, tmp_path), ["4.1"])


def test_no_xcode(tmp_path: Path) -> None:
    with pytest.raises(ShaderError, match=r"there is no .*xcrun: Apple's compilers come with Xcode, on a Mac"):
        run(str(tmp_path / "xcrun"))


@pytest.mark.parametrize("spilled", [0, 48])
def test_figures_of_a_binary(spilled: int) -> None:
    binary = stand_in_metal.binary(code=160, registers=77, spilled=spilled)
    assert gpu_binary.figures(binary) == gpu_binary.Figures(code=160, registers=77, spilled=spilled)


def test_a_binary_of_another_kind() -> None:
    with pytest.raises(gpu_binary.BinaryError, match="expected a Mach-O file, got one that begins with 0x424c544d"):
        gpu_binary.figures(b"MTLB" + bytes(100))
    whole = stand_in_metal.binary(160, 77, 48)
    with pytest.raises(gpu_binary.BinaryError, match="metadata of the GPU's binary cannot be read"):
        gpu_binary.figures(whole.replace(stand_in_metal.metadata(77, 48), bytes(len(stand_in_metal.metadata(77, 48)))))


@pytest.mark.parametrize(("few", "many"), [(12, 12), (0, 44), (12, 4000)])
def test_implausible_register_counts_are_omitted(
    few: int, many: int, xcrun: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registers = {"holds_8": few, "holds_40": many}
    monkeypatch.setattr(
        compile_shaders.Toolchain,
        "translate",
        lambda self, library, kernel, threads, arch: (
            self.missing(kernel) if kernel == "missing" else gpu_binary.Figures(16, registers.get(kernel, 20), 0)
        ),
    )
    monkeypatch.setattr(compile_shaders.Toolchain, "missing", refuse, raising=False)
    work = compile_shaders.Work(compile_shaders.Library("glu", ()), [], newest=tmp_path)
    work.kernels = {compile_shaders.Kernel(0, "glu_float", 256)}
    with compile_shaders.ThreadPoolExecutor(1) as pool:
        table = compile_shaders.native(compile_shaders.Toolchain(xcrun, tmp_path), [work], "3.1", ["g13s"], pool)
    assert table[2] == "| glu | g13s | 1 | 0 | 0.0 | - | - |" and "are implausible" in table[-1]


def refuse(self: compile_shaders.Toolchain, kernel: str) -> None:
    raise ShaderError(f"there is no {kernel}")

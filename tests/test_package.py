"""The package as users get it: a wheel in a new environment, and each instruction set; and tests of
tools/check_wheel.py, which checks every published wheel."""

import ast
import fcntl
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import release_notes
import torch_moe_metal
from check_wheel import PACKAGE, Wheel, check_macho, manylinux, record_row

pytestmark = pytest.mark.slow
MINOR = ".".join(torch.__version__.split(".")[:2])
ROOT = Path(__file__).parent.parent


def succeed(*command: str | Path, **options) -> str:
    """Run a command. Returns its output."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the checkout, so that compiled objects are reused, by one process at a time."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        succeed(*pip, "--wheel-dir", folder, ".", cwd=ROOT, env=os.environ | {"MOE_METAL_CPU": "all"})
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and this environment's torch."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parent.parent))
    succeed(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return python


def test_wheel_is_complete(wheel: Path):
    assert list(Wheel(wheel).problems(MINOR)) == []
    assert Wheel(wheel).version == f"{torch_moe_metal.__version__}+torch{MINOR}"


Files = dict[str, bytes]
INFO = f"{PACKAGE}-{torch_moe_metal.__version__}+torch{MINOR}.dist-info"


def rewritten(wheel: Path, to: Path, change: Callable[[Files], object], sealed: bool = True) -> Path:
    """The wheel with changed files and the name `to`; `sealed`: with a RECORD that matches them."""
    files = Wheel(wheel).files
    change(files)
    if sealed:
        (of_record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
        rows = [record_row(name, data) for name, data in files.items() if name != of_record] + [[of_record, "", ""]]
        files[of_record] = "".join(",".join(row) + "\n" for row in rows).encode()
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return to


def put(name: str, old: bytes, new: bytes) -> Callable[[Files], object]:
    """Replaces `old` by `new` in a file, which must contain it."""

    def change(files: Files) -> None:
        assert files[name].count(old) >= 1
        files[name] = files[name].replace(old, new)

    return change


BROKEN = {
    "another torch in the metadata": (put(f"{INFO}/METADATA", b"torch==", b"torch>="), "it requires"),
    "another version in the metadata": (put(f"{INFO}/METADATA", b"\nVersion: ", b"\nVersion: 9"), "METADATA's Version"),
    "another name in the metadata": (put(f"{INFO}/METADATA", b"Name: torch-moe", b"Name: moe"), "METADATA's Name"),
    "an older Python": (put(f"{INFO}/METADATA", b"Python: >=3.11", b"Python: >=3.8"), "Requires-Python"),
    "another tag": (put(f"{INFO}/WHEEL", b"-abi3-", b"-none-"), "WHEEL's Tag"),
    "called pure": (put(f"{INFO}/WHEEL", b"Purelib: false", b"Purelib: true"), "Root-Is-Purelib"),
    "no metadata": (lambda files: files.pop(f"{INFO}/METADATA"), "has no METADATA"),
    "another release": (put(f"{PACKAGE}/__init__.py", b"__version__ = ", b'__version__ = "9"#'), "version is"),
    "no licence": (lambda files: files.pop(f"{INFO}/licenses/LICENSE"), "LICENSE is missing"),
    "no py.typed": (lambda files: files.pop(f"{PACKAGE}/py.typed"), "py.typed is missing"),
    "no page": (lambda files: files.pop(f"{PACKAGE}/commands/serve/page.html"), "page.html is missing"),
    "a module too few": (lambda files: files.pop(f"{PACKAGE}/commands/bench/calls.py"), "bench/calls.py is missing"),
    "a library too few": (lambda files: files.pop(f"{PACKAGE}/_cpu_default.so"), "_cpu_default.so is missing"),
    "a tool in it": (lambda files: files.update({"tools/bench_mlx.py": b""}), "tools/bench_mlx.py does not belong"),
    "a test in it": (lambda files: files.update({"tests/test_ops.py": b""}), "tests/test_ops.py does not belong"),
    "an object in it": (lambda files: files.update({f"{PACKAGE}/gate.o": b""}), "gate.o does not belong"),
    "a Mac's library": (lambda files: files.update({f"{PACKAGE}/_C.so": mac_library()}), "_C.so is no ELF library"),
    "another machine's": (lambda files: change_machine(files, f"{PACKAGE}/_C.so"), "_C.so is no ELF library"),
    "not linked to torch": (put(f"{PACKAGE}/_C.so", b"libtorch_cpu.so", b"libtorch_cqu.so"), "linked to libtorch_cpu"),
    "linked to a stranger": (put(f"{PACKAGE}/_C.so", b"libc10.so", b"libc11.so"), "linked to libc11.so, which neither"),
}


def change_machine(files: Files, name: str) -> None:
    files[name] = files[name][:18] + struct.pack("<H", 8) + files[name][20:]


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of these wheels are Linux's")
@pytest.mark.parametrize("what", BROKEN)
def test_broken_wheels_are_detected(what: str, wheel: Path, tmp_path: Path):
    change, complaint = BROKEN[what]
    problems = list(Wheel(rewritten(wheel, tmp_path / wheel.name, change)).problems(MINOR))
    assert any(complaint in problem for problem in problems), problems


def test_wrong_records_are_detected(wheel: Path, tmp_path: Path):
    path = tmp_path / wheel.name
    changed = rewritten(wheel, path, put(f"{PACKAGE}/commands/doctor.py", b"import", b"imqort"), sealed=False)
    assert list(Wheel(changed).problems(MINOR)) == [f"RECORD is wrong about {PACKAGE}/commands/doctor.py"]
    less = rewritten(wheel, path, lambda files: files.pop(f"{PACKAGE}/commands/doctor.py"), sealed=False)
    assert f"RECORD is wrong about {PACKAGE}/commands/doctor.py" in list(Wheel(less).problems(MINOR))


def test_wrong_names_are_detected(wheel: Path, tmp_path: Path):
    def complaints(old: str, new: str) -> str:
        named = wheel.name.replace(old, new)
        assert named != wheel.name
        return "\n".join(Wheel(rewritten(wheel, tmp_path / named, lambda files: None)).problems(MINOR))

    assert "has no METADATA" in complaints(PACKAGE, "moe")
    assert "has no METADATA" in complaints(f"+torch{MINOR}", "+torch9.9")
    assert "unexpected tag" in complaints("-abi3-", "-cp311-")
    assert "unexpected tag" in complaints(wheel.stem.rpartition("-")[2], "macosx_14_0_universal2")
    wrong_torch = "\n".join(Wheel(wheel).problems("9.9"))
    assert "not torch==9.9.*" in wrong_torch and f"version is {torch_moe_metal.__version__}+torch{MINOR}" in wrong_torch


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_too_new_glibc_is_detected(wheel: Path, tmp_path: Path):
    """The requirements of the libraries determine the oldest glibc in a wheel's name."""
    libraries = [data for name, data in Wheel(wheel).files.items() if name.endswith(".so")]
    assert manylinux(libraries) is not None
    assert manylinux([*libraries, b"\0GLIBC_2.35\0"]) == 35
    assert manylinux([b"\0GLIBC_2.2.5\0", b"\0GLIBCXX_3.4.29\0"]) == 34
    assert manylinux([b"\0GLIBC_2.99\0"]) is None
    tag = f"cp311-abi3-manylinux_2_28_{platform.machine()}"

    def change(files: Files) -> None:
        about = f"{INFO}/WHEEL"
        files[about] = re.sub(rb"Tag: .*", f"Tag: {tag}".encode(), files[about])
        files[f"{PACKAGE}/_C.so"] += b"\0GLIBC_2.35\0"

    path = rewritten(wheel, tmp_path / f"{INFO.removesuffix('.dist-info')}-{tag}.whl", change)
    assert list(Wheel(path).problems(MINOR)) == ["its libraries need the systems of glibc 2.35, its name says 2.28"]


def mac_library(
    macos: int = 14, signed: bool = True, linked: str = "@rpath/libtorch_cpu.dylib", cpu: int = 0xC
) -> bytes:
    """The head of a library for macOS, as far as check_macho reads it."""
    name = linked.encode().ljust(len(linked) // 8 * 8 + 8, b"\0")
    commands = [
        struct.pack("<6I", 0xC, 24 + len(name), 24, 0, 0, 0) + name,
        struct.pack("<6I", 0x32, 24, 1, macos << 16, macos << 16, 0),
        *([struct.pack("<4I", 0x1D, 16, 0, 0)] if signed else []),
    ]
    head = struct.pack("<8I", 0xFEEDFACF, 0x01000000 | cpu, 0, 6, len(commands), sum(map(len, commands)), 0, 0)
    return head + b"".join(commands)


def test_broken_mac_libraries_are_detected():
    assert list(check_macho(mac_library(), "14.0")) == []
    assert list(check_macho(mac_library(cpu=7), "14.0")) == ["is no Mach-O library for arm64"]
    assert "is for macOS 15.0 and newer" in next(check_macho(mac_library(macos=15), "14.0"))
    assert "is not signed" in next(check_macho(mac_library(signed=False), "14.0"))
    homebrew = list(check_macho(mac_library(linked="/opt/homebrew/lib/libomp.dylib"), "14.0"))
    assert homebrew[0] == "is not linked to libtorch_cpu" and "linked to /opt/homebrew/lib/libomp.dylib" in homebrew[1]


def empty_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def release(wheel: Path, tmp_path: Path) -> Path:
    """A folder `release` with the wheels of one release, for three versions of torch, beside a folder `index` with what
    they require, as wheels with names only."""
    for folder in ("release", "index"):
        (tmp_path / folder).mkdir()
    for torch_minor in ("9.8", MINOR, "0.9"):

        def rename(files: Files, to: str = f"+torch{torch_minor}") -> None:
            for name in list(files):
                if name.startswith(INFO):
                    content = files.pop(name).replace(MINOR.encode(), to.removeprefix("+torch").encode())
                    files[name.replace(f"+torch{MINOR}", to)] = content

        named = wheel.name.replace(f"+torch{MINOR}", f"+torch{torch_minor}")
        rewritten(wheel, tmp_path / "release" / named, rename)
        empty_wheel(tmp_path / "index", "torch", f"{torch_minor}.0")
    for name in ("transformers", "accelerate"):
        empty_wheel(tmp_path / "index", name, "99.0")
    return tmp_path / "release"


def pip_would_install(release: Path, asked: str) -> str:
    """What `pip install` with these words, of a shell, takes from a release."""
    pip = (sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--no-index")
    command = f"{shlex.join(pip)} --find-links {release.parent / 'index'} {asked}"
    # a configuration may have constraints on torch
    printed = succeed("bash", "-c", command, env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
    return printed.strip().rpartition("\n")[2].removeprefix("Would install ")


OURS = f"torch-{MINOR}.0 torch-moe-metal-{torch_moe_metal.__version__}+torch{MINOR}"


def test_pip_installs_the_wheel_for_the_requested_torch(release: Path):
    version = torch_moe_metal.__version__
    found = f"--find-links {release}"
    assert pip_would_install(release, f"torch-moe-metal 'torch=={MINOR}.*' {found}") == OURS
    assert pip_would_install(release, f"torch-moe-metal=={version}+torch{MINOR} {found}") == OURS
    # Without a torch in the command, pip installs the newest, with its torch.
    assert pip_would_install(release, f"torch-moe-metal {found}") == OURS.replace(MINOR, "9.8")


def test_the_readme_installs_from_the_page_of_a_release(release: Path):
    """Its command, with the notes that the workflow `wheels` publishes as the page."""
    lines = (ROOT / "README.md").read_text().replace("\\\n", " ").splitlines()
    (command,) = (" ".join(line.split()) for line in lines if "--find-links" in line)
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text().replace("\\\n", " ")
    assert command in " ".join(workflow.split())  # it runs the same command after a release

    tag = f"v{torch_moe_metal.__version__}"
    notes = release_notes.notes(tag, [wheel.name for wheel in release.glob("*.whl")])
    links = re.findall(rf"^- \[(.+)\]\({release_notes.HOME}/releases/download/{tag}/(.+)\)$", notes, re.MULTILINE)
    assert len(links) == 3
    page = release.parent / "page.html"
    page.write_text("".join(f'<a href="{release.as_uri()}/{url}">{name}</a>' for name, url in links))

    asked = command.removeprefix("pip install ").replace(f"{release_notes.HOME}/releases/latest", str(page))
    asked = re.sub("python -c '.+?'", f"echo {MINOR}.0", asked)  # the torch that is installed
    assert asked == f'"torch_moe_metal[transformers]" "torch==$(echo {MINOR}.0)" --find-links {page}'
    assert pip_would_install(release, asked) == f"accelerate-99.0 {OURS} transformers-99.0"


def test_wheel_works_from_another_directory(stranger: Path, tmp_path: Path):
    program = """
import torch, torch_moe_metal
weights, ids = torch.ops.moe_metal.route(torch.tensor([[1.0, 3.0, 2.0]]), top_k=2)
assert ids.tolist() == [[1, 2]] and abs(float(weights.sum()) - 1) < 1e-6
x, ids = torch.ones(1, 8), torch.zeros(1, 1, dtype=torch.int32)
out = torch.ops.moe_metal.experts(x, torch.ones(1, 1), ids, torch.ones(2, 8, 8), torch.ones(2, 8, 4))
assert torch.allclose(out, 4 * 8 * torch.nn.functional.silu(torch.tensor(8.0)).expand(1, 8))
print(torch_moe_metal.__file__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = Path(succeed(stranger, "-c", program, cwd=tmp_path, env=environment).strip())
    assert stranger.parent.parent in place.parents


def test_checkout_hiding_the_installed_package_raises(stranger: Path, tmp_path: Path):
    """After `pip install .`, in the folder of the checkout."""
    (hidden,) = stranger.parent.parent.glob(f"lib/python*/site-packages/{PACKAGE}")
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run([stranger, "-m", PACKAGE, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert f"hides the installed package, {hidden}. Run Python in another folder" in done.stderr
    (tmp_path / "elsewhere").mkdir()
    assert succeed(stranger, "-m", PACKAGE, "--version", cwd=tmp_path / "elsewhere")


def setup_says(*options: str, **environment: str) -> str:
    command = (sys.executable, *options, "setup.py", "--name")
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True).stderr


def test_build_without_torch_raises():
    assert "is compiled for the torch that it will run with" in setup_says("-S")  # -S: without site-packages


def test_build_with_an_old_python_raises(tmp_path: Path):
    source = (ROOT / "setup.py").read_text()
    ast.parse(source, feature_version=(3, 8))  # otherwise the error would be a SyntaxError
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.version_info = (3, 10, 0)")
    assert "torch_moe_metal needs Python 3.11 or newer" in setup_says(PYTHONPATH=str(tmp_path))


def test_isolated_build_prints_its_torch(tmp_path: Path):
    place = tmp_path / "pip-build-env-1"
    place.mkdir()
    (place / "torch").symlink_to(Path(torch.__file__).parent)
    assert f"This isolated build is for torch {MINOR}.*, the newest" in setup_says(PYTHONPATH=str(place))
    assert "isolated" not in setup_says()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the message lists those of x86")
def test_unknown_instruction_sets_raise(tmp_path: Path):
    build = (sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path))
    environment = os.environ | {"MOE_METAL_CPU": "native,sse9"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.strip().endswith(
        "MOE_METAL_CPU: expected all, native or a list of avx512, avx2, default; got sse9"
    )

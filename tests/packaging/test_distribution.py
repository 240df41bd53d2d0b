"""The contents of the source distribution and of the wheel built from it, which need no torch."""

from __future__ import annotations

import ast
import configparser
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_smartinfinity.native import _core
from tests.helpers import native_testing
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, PROCESS_LIMIT

pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_smartinfinity"

# What the wheel holds depends neither on optimisation nor on debug information, which take most of a build's time.
_QUICK_BUILD = ("-Ccmake.build-type=Debug", "-Ccmake.define.CMAKE_CXX_FLAGS_DEBUG=")


LONG = pytest.mark.long  # the wheel takes a minute of CPU to build


def build(*options: str | Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *_QUICK_BUILD, *options],
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tarfile.TarFile]:
    """Build the source distribution of this checkout, and open it."""
    folder = tmp_path_factory.mktemp("sdist")
    build("--sdist", "--outdir", folder, ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        yield archive


@pytest.fixture(scope="module")
def wheel_file(source_distribution: tarfile.TarFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution, and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    source_distribution.extractall(folder)
    build("--wheel", "--outdir", folder, next(path for path in folder.iterdir() if path.is_dir()))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel_file)


@LONG
def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The wheel has every module and stub, one extension with its own, and py.typed, but no sources or tests."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    python = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.py*") if path.suffix in (".py", ".pyi")}
    extensions = {name for name in names if name.endswith(".so")}
    assert names - extensions == python | {f"{PACKAGE}/py.typed", f"{PACKAGE}/native/_core.pyi"}
    assert len(extensions) == 1
    assert extensions.pop().startswith(f"{PACKAGE}/native/_core.")


@LONG
def test_wheel_injects_no_faults(wheel: zipfile.ZipFile) -> None:
    """By default the extension and its stub lack the names and engines that exist for tests."""
    stub = wheel.read(f"{PACKAGE}/native/_core.pyi").decode()
    body = ast.parse(stub).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert names - {"__all__"} == set(_core.__all__)
    assert not names & set(native_testing.__all__)
    extension = wheel.read(next(name for name in wheel.namelist() if name.endswith(".so")))
    assert b"FileQueue" in extension  # proves that class names can be read in the file
    engines, hooks = rb"FaultInjectingEngine|HoldingEngine|ThrottledEngine", rb"decorate_engine|use_cuda_library"
    assert not re.search(engines + rb"|" + hooks + rb"|select_instruction_set", extension)


def test_source_distribution_holds_what_a_build_and_the_tests_need(source_distribution: tarfile.TarFile) -> None:
    """The distribution has the core's sources and the tests, but no environment, build or binary."""
    names = {name.split("/", 1)[1] for name in source_distribution.getnames() if "/" in name}
    core = {str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE / "native" / "src").rglob("*") if path.is_file()}
    needed = {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "pyproject.toml", "tests/conftest.py", *core}
    assert needed <= names
    assert not {name for name in names if name.startswith((".venv", "build/", ".git/")) or name.endswith(".so")}


@LONG
def test_entry_points(wheel: zipfile.ZipFile) -> None:
    """The wheel declares the entry points for discovery and for the command."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["torch.backends"]) == {"smart_infinity": f"{PACKAGE}._autoload:install"}
    assert dict(entry_points["console_scripts"]) == {"smart-infinity": f"{PACKAGE}.cli:main"}


def test_requirements(source_distribution: tarfile.TarFile) -> None:
    """Users get the package's own requirements, and none that only developers need."""
    name = next(name for name in source_distribution.getnames() if name.endswith("/PKG-INFO"))
    file = source_distribution.extractfile(name)
    assert file is not None
    metadata = email.message_from_bytes(file.read())
    always = {line.replace(" ", "") for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    names = {re.split(r"[<>=!\[;]", requirement)[0] for requirement in always}
    assert names == {"torch", "lightning", "deepspeed", "torchmetrics", "numpy", "tqdm", "typing-extensions"}
    assert always >= {"torch>=2.6", "lightning>=2.6.6"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_build_needs_no_torch() -> None:
    """The core does not use torch, so that one wheel fits every torch and builds without one."""
    requires = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires is not None
    names = re.findall(r'"([\w-]+)', requires[1])
    assert "nanobind" in names and "torch" not in names


@LONG
def test_installed_core_runs_alone(wheel_file: Path, tmp_path: Path) -> None:
    """The wheel's extension loads and computes without torch or any other installed package."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path]
    subprocess.run([*pip, wheel_file], check=True, timeout=PROCESS_LIMIT)
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from lightning_smartinfinity import native
        data = native.HostBuffer(4096)
        data.memoryview()[:9] = b"123456789"
        assert not {set(native_testing.__all__)!r} & vars(native._core).keys()
        print(native.__file__, hex(native.crc32c(data.address, 9)))
    """
    # With -S there are no site-packages.
    completed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=PROCESS_LIMIT
    )
    assert completed.returncode == 0, completed.stderr
    file, checksum = completed.stdout.split()
    assert Path(file).is_relative_to(tmp_path)
    assert checksum == "0xe3069283"  # CRC-32C of "123456789" (RFC 3720)

"""Documents name what is there, pages for contributors are short, and public names stay."""

from __future__ import annotations

import ast
import configparser
import email
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_smartinfinity
from lightning_smartinfinity import errors
from lightning_smartinfinity.native import _core
from tests.helpers import native_testing
from tests.helpers.fresh_python import fresh_python
from tests.helpers.waiting import BUILD_LIMIT, BUILD_TEST_LIMIT, PROCESS_LIMIT

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "benchmarks", "hls", "examples", "tests")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))


def headings(document: Path) -> set[str]:
    """Return the anchors of a document's headings, made as on GitHub."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    """No relative link is broken, and each link to a part of a document names a heading that is there."""
    files = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    assert [file for file in files if "://" not in file and not (document.parent / file).exists()] == []
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text())
    targets = [(document.parent / name if name else document, anchor) for name, anchor in links]
    assert [anchor for path, anchor in targets if path.suffix == ".md" and anchor not in headings(path)] == []


def test_make_targets_named_in_documents_exist() -> None:
    """Every ``make something`` in a document is a target."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets


def test_files_that_documents_name_exist() -> None:
    """Each path of a test or a benchmark in the documents is that of a file."""
    text = "\n".join(document.read_text() for document in DOCUMENTS if document.name != "CHANGELOG.md")
    named = set(re.findall(r"\b((?:benchmarks|tests)/[\w/]+\.py)", text))
    assert len(named) > 20 and [name for name in sorted(named) if not (ROOT / name).exists()] == []


PACKAGE = ROOT / "lightning_smartinfinity"
PAGES = ("architecture.md", "bytes_on_storage.md", "gpu.md", "native_core.md")
GENERATED = {"kernels/update_rules.hpp", "native/_core.pyi"}
NOT_OURS = {"CMakeLists.txt", "ModelCheckpoint"}


def quoted(pattern: str) -> list[str]:
    """Return what the pages quote in this form, outside of blocks of code."""
    texts = [(ROOT / "docs" / page).read_text() for page in PAGES]
    plain = [re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    names = {name for text in plain for name in re.findall(r"`([^`\n]+)`", text)}
    return sorted(name for name in names - NOT_OURS if re.fullmatch(pattern, name))


@cache
def words_by_source() -> list[tuple[set[str], set[str]]]:
    """Return for each source of the package the classes and constants that it defines, and all of its words."""
    sources = [path.read_text() for path in PACKAGE.rglob("*") if path.suffix in {".py", ".hpp", ".cpp"}]
    definition = r"\b(?:class|struct) (\w+)|\b(\w+)(?:\[\])?(?::.*)? = "
    return [
        ({name for names in re.findall(definition, source) for name in names}, set(re.findall(r"\w+", source)))
        for source in sources
    ]


def test_the_walk_is_short_and_begins_with_a_step() -> None:
    """The page has at most so many words, and the first line of a step is among the first of them."""
    page = (ROOT / "docs/architecture.md").read_text()
    assert len(page.split()) <= 2500
    before, step, _ = page.partition("\n1. ")
    assert step and len(before.split()) < 300


def test_files_and_folders_exist() -> None:
    """Each file and folder is in the package, in a room of it or of the core, or in the repository."""
    places = (PACKAGE, ROOT, PACKAGE / "native/src", *PACKAGE.glob("*/"))
    paths = set(quoted(r"[a-z]\w*/(?:[\w.]+/)*(?:\w+\.\w+)?")) - GENERATED
    assert (
        len(paths) > 50
        and [path for path in sorted(paths) if not any((place / path).exists() for place in places)] == []
    )


def test_classes_and_their_members_exist() -> None:
    """Each class is defined, in a file that has the method or attribute named with it."""
    owned = defaultdict[str, set[str]](set)
    for defined, words in words_by_source():
        for name in defined:
            owned[name] |= words
    names = [name.partition(".") for name in quoted(r"_?[A-Z]\w*[a-z]\w*(?:\.\w+)?|k[A-Z]\w+")]
    assert (
        len(names) > 50 and [name for name in names if not owned[name[0]].issuperset({name[0], name[2]} - {""})] == []
    )


def test_functions_exist() -> None:
    """Each function, setting and attribute that is named alone occurs in the package."""
    known = set[str]().union(*(words for _, words in words_by_source()))
    assert [name for name in quoted(r"[a-z]+(?:_[a-z]+)+") if name not in known] == []


# ---- the public names of the package


PUBLIC = {
    "ActivationOffload",
    "BlockScaled",
    "PlanConfig",
    "RandomStates",
    "SmartInfinityFabricStrategy",
    "SmartInfinityPrecision",
    "SmartInfinityStrategy",
    "SmartSSDConfig",
    "StorageTrafficMonitor",
    "TopK",
    "TransferConfig",
    "__version__",
    *errors.__all__,
}

# What pages, examples and configuration files name below the package.
BELOW = (
    *("activations.OffloadedActivations", "activations.paused"),
    *("huggingface.SmartInfinityTraining", "precision.SmartInfinityPrecision", "errors.SmartInfinityError"),
    *("metrics.BytesPerParameter", "metrics.StorageBandwidth", "metrics.StorageBytes", "metrics.StorageWait"),
    *("metrics.traffic_between", "plan.Dense", "plan.Overlap", "plan.System", "plan.Workload"),
    *("plan.cost", "plan.fit", "plan.simulate_step", "transfer.convert.convert_store"),
)


@pytest.mark.parametrize("path", BELOW)
def test_names_below_the_package_stay(path: str) -> None:
    """A path that a page names can be imported."""
    home, _, name = f"lightning_smartinfinity.{path}".rpartition(".")
    try:
        found = getattr(importlib.import_module(home), name)
    except AttributeError:
        found = importlib.import_module(f"{home}.{name}")
    assert found is not None


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("transfer.convert", "pipeline.state.convert"),
        ("plan", "planning"),
        ("plan.cost", "planning.cost"),
        ("config.transfer", "settings.transfer"),
        ("compression.top_k", "settings.top_k"),
        ("strategy", "integrations.trainer.strategy"),
        ("huggingface", "integrations.transformers"),
        ("huggingface.training", "integrations.transformers.training"),
    ],
)
def test_a_module_has_one_identity_under_both_names(earlier: str, now: str) -> None:
    """A module that was moved is the same object by its earlier name, as pickles need it, and keeps its own name."""
    module = importlib.import_module(f"lightning_smartinfinity.{earlier}")
    assert module is importlib.import_module(f"lightning_smartinfinity.{now}")
    assert hasattr(module, "__path__") == (
        module.__spec__ is not None and module.__spec__.submodule_search_locations is not None
    )
    assert module.__spec__ is not None and module.__name__ == module.__spec__.name == f"lightning_smartinfinity.{now}"


def test_all_is_sorted_and_complete() -> None:
    """Every public name is listed once, in order, and can be loaded."""
    assert lightning_smartinfinity.__all__ == sorted(PUBLIC)
    for name in lightning_smartinfinity.__all__:
        assert getattr(lightning_smartinfinity, name) is not None


def test_type_checkers_see_every_lazy_name() -> None:
    """Names loaded on first use are also imported under TYPE_CHECKING, from the same module."""
    seen = {
        alias.name: statement.module
        for block in ast.walk(ast.parse(inspect.getsource(lightning_smartinfinity)))
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == {name: f"lightning_smartinfinity.{home}" for name, home in lightning_smartinfinity._HOMES.items()}


def test_unknown_name() -> None:
    """A misspelt name raises an ordinary AttributeError."""
    with pytest.raises(AttributeError, match=r"'lightning_smartinfinity' has no attribute 'SmartInfinity'"):
        lightning_smartinfinity.SmartInfinity  # noqa: B018


def test_import_loads_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Importing the package loads no heavy library until one of its names is used."""
    code = """
    import sys
    before = set(sys.modules)
    import lightning_smartinfinity
    print(sorted(set(sys.modules) - before))
    """
    added = ast.literal_eval(fresh_python(code, cwd=tmp_path))
    assert {name for name in added if name.startswith("lightning_smartinfinity")} == {
        "lightning_smartinfinity",
        "lightning_smartinfinity._autoload",
        "lightning_smartinfinity.checkpoint_hint",
    }
    assert not {"torch", "lightning", "numpy", "deepspeed"} & set(added)


def test_version_is_that_of_the_installed_package() -> None:
    """The version is defined in one place."""
    assert importlib.metadata.version("lightning-smartinfinity") == lightning_smartinfinity.__version__


def test_changelog_says_what_is_released_and_when() -> None:
    """Unreleased changes come first, and every release has its date."""
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    unreleased, *releases = re.findall(r"^## .*$", changelog, re.MULTILINE)
    assert unreleased == "## [Unreleased]"
    assert [title for title in releases if not re.fullmatch(r"## \[\d+\.\d+\.\d+] - \d{4}-\d\d-\d\d", title)] == []


# ---- the contents of the source distribution and of the wheel built from it, which need no torch


pytestmark = pytest.mark.timeout(BUILD_TEST_LIMIT)

NAME = "lightning_smartinfinity"

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
    python = {str(path.relative_to(ROOT)) for path in (ROOT / NAME).rglob("*.py*") if path.suffix in (".py", ".pyi")}
    extensions = {name for name in names if name.endswith(".so")}
    assert (
        names - extensions == python | {f"{NAME}/py.typed", f"{NAME}/native/_core.pyi"}
        and len(extensions) == 1
        and extensions.pop().startswith(f"{NAME}/native/_core.")
    )


@LONG
def test_wheel_injects_no_faults(wheel: zipfile.ZipFile) -> None:
    """By default the extension and its stub lack the names and engines that exist for tests."""
    body = ast.parse(wheel.read(f"{NAME}/native/_core.pyi").decode()).body
    names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert names - {"__all__"} == set(_core.__all__) and not names & set(native_testing.__all__)
    extension = wheel.read(next(name for name in wheel.namelist() if name.endswith(".so")))
    assert b"FileQueue" in extension  # proves that class names can be read in the file
    engines, hooks = rb"FaultInjectingEngine|HoldingEngine|ThrottledEngine", rb"decorate_engine|use_cuda_library"
    assert not re.search(engines + rb"|" + hooks + rb"|select_instruction_set", extension)


def test_source_distribution_holds_what_a_build_and_the_tests_need(source_distribution: tarfile.TarFile) -> None:
    """The distribution has the core's sources and the tests, but no environment, build or binary."""
    names = {name.split("/", 1)[1] for name in source_distribution.getnames() if "/" in name}
    core = {str(path.relative_to(ROOT)) for path in (ROOT / NAME / "native" / "src").rglob("*") if path.is_file()}
    needed = {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "pyproject.toml", "tests/conftest.py", *core}
    assert needed <= names
    assert not {name for name in names if name.startswith((".venv", "build/", ".git/")) or name.endswith(".so")}


@LONG
def test_entry_points(wheel: zipfile.ZipFile) -> None:
    """The wheel declares the entry points for discovery and for the command."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["torch.backends"]) == {"smart_infinity": f"{NAME}._autoload:install"}
    assert dict(entry_points["console_scripts"]) == {"smart-infinity": f"{NAME}.cli:main"}


def test_requirements(source_distribution: tarfile.TarFile) -> None:
    """Users get the package's own requirements, and none that only developers need."""
    name = next(name for name in source_distribution.getnames() if name.endswith("/PKG-INFO"))
    file = source_distribution.extractfile(name)
    assert file is not None
    metadata = email.message_from_bytes(file.read())
    always = {line.replace(" ", "") for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    names = {re.split(r"[<>=!\[;]", requirement)[0] for requirement in always}
    assert (
        names == {"torch", "lightning", "deepspeed", "torchmetrics", "numpy", "tqdm", "typing-extensions"}
        and always >= {"torch>=2.6", "lightning>=2.6.6"}
        and metadata["Requires-Python"] == ">=3.10"
        and metadata["License-Expression"] == "Apache-2.0"
    )


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

"""tests/README.md names every folder of tests, every room of the package, and the modules that no test imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.house import names_in, untested

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "lightning_smartinfinity"
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (TESTS / "README.md").read_text(), re.MULTILINE)
FOLDERS = {name.rstrip("/"): told for name, told in ROWS if name.endswith("/")}
UNNAMED = {name: told for name, told in ROWS if not name.endswith("/")}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import package.room.module", "package.room.module"),
        ("from package.room import module", "package.room.module"),
        ("from package.room.module import name", "package.room.module"),
        ("patch('package.room.module')", "package.room.module"),
    ],
)
def test_a_name_is_found(source: str, name: str) -> None:
    """A module is found in every way that a test can name it."""
    assert name in names_in(source)


def test_every_folder_of_tests_is_on_the_page() -> None:
    """The page names no other folder. Helpers are not tests."""
    folders = {folder.name for folder in TESTS.iterdir() if list(folder.glob("*.py"))}
    assert set(FOLDERS) == folders - {"helpers"}


def test_every_room_is_tested_by_a_folder() -> None:
    """Every module and folder at the package's top has a row with a folder of tests."""
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    named = {name.split(".")[0] for told in FOLDERS.values() for name in re.findall(r"`([\w.]+)`", told)}
    assert rooms - {"__init__", "lightning_options"} <= named


def test_modules_that_no_test_imports_are_on_the_page() -> None:
    """The page lists exactly these in alphabetical order. A new module needs a test that names it, or a row."""
    unnamed = {name.removeprefix(f"{PACKAGE.name}.") for name in untested(TESTS.parent)}
    assert {"missing": sorted(unnamed - set(UNNAMED)), "too many": sorted(set(UNNAMED) - unnamed)} == {
        "missing": [],
        "too many": [],
    }
    assert list(UNNAMED) == sorted(UNNAMED)


@pytest.mark.parametrize("module", UNNAMED)
def test_the_test_that_covers_a_module_exists(module: str) -> None:
    """The named file is a file of tests."""
    (file,) = re.findall(r"`([^`]+)`", UNNAMED[module])
    assert (TESTS / file).name.startswith("test_") and (TESTS / file).is_file()

"""The page on keeping something new on storage names existing code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_smartinfinity"
QUOTED = re.findall(r"`([^`\n]+)`", (ROOT / "docs/adding_something_on_storage.md").read_text())
NAMES = sorted({name for name in QUOTED if re.fullmatch(r"\w+(\.\w+)+", name) and not name.endswith(".py")})
CLASSES = sorted({name for name in QUOTED if re.fullmatch(r"[A-Z]\w+[a-z]", name)})
FILES = sorted({name for name in QUOTED if re.fullmatch(r"[\w/]+(/|\.py)", name)})
OF_THE_STANDARD_LIBRARY = {"os.write", "os.getpid", "weakref.finalize"}


def found(name: str) -> object:
    """Return the object of a dotted name below the package."""
    value: object = importlib.import_module("lightning_smartinfinity")
    for part in name.removeprefix("lightning_smartinfinity.").split("."):
        if not hasattr(value, part) and isinstance(value, ModuleType):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(set(NAMES) - OF_THE_STANDARD_LIBRARY))
def test_names_are_importable(name: str) -> None:
    """Each module, class, function and method that the page names exists."""
    assert found(name) is not None


@pytest.mark.parametrize("name", CLASSES)
def test_classes_named_alone_are_named_in_full_elsewhere(name: str) -> None:
    """The page also names each class together with its module."""
    assert any(name in dotted.split(".") for dotted in NAMES)


@pytest.mark.parametrize("name", FILES)
def test_files_exist(name: str) -> None:
    """Each file and folder is in the package or in the repository."""
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


def test_the_page_names_every_step() -> None:
    """Each row of the table names what to use."""
    rows = [line.split("|") for line in (ROOT / "docs/adding_something_on_storage.md").read_text().splitlines()]
    used = [re.findall(r"`([\w.]+)`", row[2]) for row in rows if len(row) == 5 and "---" not in row[1]][1:]
    assert len(used) >= 9
    assert all(names and set(names) <= set(NAMES) for names in used)

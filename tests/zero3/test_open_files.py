"""The limit of open files is checked before a training is set up."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.zero3 import require_descriptors
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import fit

INFINITE = resource.RLIM_INFINITY


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Stand for the process's limit of open files; return a list of which the last one is in force."""
    in_force = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: in_force[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: in_force.append(limits))
    return in_force


def test_a_limit_that_is_too_low_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ulimit -n 24 a fit raises our error, which names the limit, instead of gloo's."""
    limits(monkeypatch, 24, 24)
    with pytest.raises(
        StorageError, match=r"may open 24 files .* with 1 process on this machine and 1 storage folder needs"
    ) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert "ulimit -n 1024" in caught.value.remedy and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ((24, 4096), (4096, 4096)),
        ((24, INFINITE), (88, INFINITE)),
        ((88, 88), (88, 88)),
        ((INFINITE, INFINITE), (INFINITE, INFINITE)),
    ],
)
def test_a_limit_that_may_be_raised_is_raised(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], then: tuple[int, int]
) -> None:
    """The soft limit is raised as far as it may be if it is too low, and left alone otherwise."""
    in_force = limits(monkeypatch, *before)
    require_descriptors(num_processes=1, num_folders=2)
    assert in_force[-1] == then


def test_processes_and_folders_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes on the machine, or more folders, need a higher limit."""
    limits(monkeypatch, 88, 88)
    for further in ({"num_processes": 2, "num_folders": 2}, {"num_processes": 1, "num_folders": 3}):
        with pytest.raises(StorageError, match=r"[23] (processes|storage folders).* ulimit -n"):
            require_descriptors(**further)

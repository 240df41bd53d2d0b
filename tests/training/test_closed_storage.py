"""The error for optimizer state that is no longer there says which training took its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_smartinfinity import SmartInfinityStrategy, StorageError
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit

RECIPE = Recipe(depth=1)


class Later(LitTiny):
    """A module that is trained after another one."""


def test_a_later_fit_on_the_same_folder(tmp_path: Path) -> None:
    """The error names the module of the later fit, when it began, and the folder that it took."""
    first = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    fit(Later(RECIPE), tmp_path, max_steps=1)
    with pytest.raises(StorageError) as caught:
        first.save_checkpoint(tmp_path / "first.ckpt")
    problem = caught.value.problem
    assert "has been closed, since a training of Later that began at " in problem
    assert problem.endswith(f"took its storage {str(tmp_path / 'storage')!r} (job 'default').")
    assert not (tmp_path / "first.ckpt").exists()


def test_a_later_fit_of_the_same_module_on_another_folder(tmp_path: Path) -> None:
    """The error says that the module was taken."""
    module = Later(RECIPE)
    first = fit(module, tmp_path, max_steps=1)
    second = SmartInfinityStrategy(tmp_path / "other")
    fit(module, tmp_path, second, max_steps=1)
    with pytest.raises(StorageError, match=r"since a training of Later that began at [\d:]{8} took its module\."):
        first.save_checkpoint(tmp_path / "first.ckpt")
    second.close()


def test_a_strategy_that_was_closed(tmp_path: Path) -> None:
    """The error says who closed it, and keeps to that when a later fit comes."""
    first = fit(LitTiny(RECIPE), tmp_path, max_steps=1)
    assert isinstance(first.strategy, SmartInfinityStrategy)
    first.strategy.close()
    fit(Later(RECIPE), tmp_path, max_steps=1)
    with pytest.raises(StorageError, match=r"has been closed, since close\(\) was called\. Start a new fit"):
        first.save_checkpoint(tmp_path / "first.ckpt")

"""Trainings that many tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import cli
from tests.export.models import LitModel, Trained, train

__all__ = ["cli", "trained"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return a function that trains a kind of model in bf16, once for all tests."""
    done: dict[str, Trained] = {}

    def of_kind(kind: str) -> Trained:
        if kind not in done:
            done[kind] = train(tmp_path_factory.mktemp(kind), LitModel(kind))
        return done[kind]

    return of_kind

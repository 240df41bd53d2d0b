"""Nothing is compiled between installation and the first step."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.models import Recipe
from tests.training.worker import Run, launch


def test_training_compiles_nothing(tmp_path: Path) -> None:
    """A fit runs without a compiler on the machine, and torch's extension cache stays empty."""
    cache = tmp_path / "extensions"
    cache.mkdir()
    tools = dict.fromkeys(("CC", "CXX", "CUDAHOSTCXX"), "/nonexistent")
    (outcome,) = launch(
        Run(out=str(tmp_path / "run"), recipe=Recipe(precision="bf16-mixed", max_steps=2)),
        env={**tools, "TORCH_EXTENSIONS_DIR": str(cache)},
        anew=True,
    )
    assert len(outcome.losses) == 2
    assert not list(cache.iterdir())

"""The public names of ``import lightning_smartinfinity``."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import lightning_smartinfinity
from lightning_smartinfinity import errors
from tests.helpers.fresh_python import fresh_python

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

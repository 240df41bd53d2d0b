"""The post-import hook leaves the hooked module as it was and is silent when it fails."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer

from lightning_smartinfinity import ConfigError, _autoload

TARGET = "lightning_smartinfinity_hook_target"
SOURCE = "LOADS = globals().get('LOADS', 0) + 1\nStrategyRegistry = None\n"


@pytest.fixture
def registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of registered modules. A module to be imported and hooked is on the path."""
    (tmp_path / f"{TARGET}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: seen.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield seen
    sys.modules.pop(TARGET, None)


def hooks() -> list[object]:
    return [finder for finder in sys.meta_path if type(finder).__module__ == _autoload.__name__]


def test_module_is_registered_with_after_its_import(registrations: list[str]) -> None:
    """A module imported after the installation is registered once and keeps its own loader."""
    _autoload.install()
    module = importlib.import_module(TARGET)
    assert registrations == [TARGET]
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == SOURCE


def test_module_loaded_before_is_registered_with_at_once(registrations: list[str]) -> None:
    """A module imported before the installation is registered at once."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hooks()]
    importlib.import_module(TARGET)
    assert registrations == []
    _autoload.install()
    assert registrations == [TARGET]


def test_a_failing_import_fails_as_it_would_alone(registrations: list[str], tmp_path: Path) -> None:
    """The user sees the module's own error, and the next import works."""
    (tmp_path / f"{TARGET}.py").write_text("raise ZeroDivisionError")
    _autoload.install()
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(TARGET)
    assert registrations == []
    (tmp_path / f"{TARGET}.py").write_text(SOURCE + "# of another size than before\n")
    importlib.invalidate_caches()
    importlib.import_module(TARGET)
    assert registrations == [TARGET]


def test_failed_registration_is_swallowed(
    registrations: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failed registration never breaks an import. A debug variable shows its traceback."""
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: 1 // 0)
    _autoload.install()
    importlib.import_module(TARGET)
    _autoload.install()
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("SMART_INFINITY_AUTOLOAD_DEBUG", "1")
    _autoload.install()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_failed_installation_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing installation does not make install raise."""
    monkeypatch.setattr(_autoload, "_install_finder", lambda: 1 // 0)
    _autoload.install()


def test_module_without_registry_is_left_alone() -> None:
    """A Lightning module without the registry is left alone, such as one still being executed."""
    _autoload._register_with_trainer(ModuleType("lightning.pytorch.strategies"))


@pytest.mark.parametrize("name", ["smart_infinity", "smart-infinity"])
def test_name_that_the_user_registered_stays_theirs(name: str) -> None:
    """A preset that the user registered under the name, or under one like it, is kept."""
    module = ModuleType("lightning.pytorch.strategies")
    module.StrategyRegistry = registry = _StrategyRegistry()  # type: ignore[attr-defined]
    registry.register(name, dict, storage="mine")
    _autoload._register_with_trainer(module)
    assert registry.get(name) == {"storage": "mine"}


@pytest.mark.parametrize("name", ["Smart-Infinity", "smart infinity", "smart_infinty", "SmartInfinityFabricStrategy"])
@pytest.mark.parametrize("user", [Trainer, Fabric])
def test_another_spelling_of_the_name(name: str, user: Callable[..., object]) -> None:
    """Trainer and Fabric answer it with the name of the strategy."""
    _autoload.install()
    with pytest.raises(ConfigError, match=r"Write strategy='smart_infinity'\.") as caught:
        user(strategy=name, accelerator="cpu", devices=1)
    assert f"strategy={name.lower()!r} is no name" in str(caught.value)


def test_reload_leaves_one_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload of the package removes the old finder."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    _autoload.install()
    importlib.reload(_autoload).install()
    assert len(hooks()) == 1


def test_other_finders_that_ask_everybody_else(registrations: list[str]) -> None:
    """A finder that delegates to all others, as ours does, causes no endless recursion."""

    class Delegating:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            others = [finder for finder in sys.meta_path if finder is not self]
            return next((spec for o in others if (spec := o.find_spec(name, path, target))), None)  # type: ignore

    _autoload.install()
    sys.meta_path.append(Delegating())  # type: ignore[arg-type]
    importlib.import_module(TARGET)
    assert registrations == [TARGET]

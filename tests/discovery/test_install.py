"""The post-import hook itself: harmless to what it hooks, and silent when it fails."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry

from lightning_smartinfinity import _autoload

TARGET = "lightning_smartinfinity_hook_target"
SOURCE = "LOADS = globals().get('LOADS', 0) + 1\nStrategyRegistry = None\n"


@pytest.fixture
def registrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A module to be imported and hooked; the list grows by one name with every registration."""
    (tmp_path / f"{TARGET}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: seen.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield seen
    sys.modules.pop(TARGET, None)


def hooks() -> list[object]:
    return [finder for finder in sys.meta_path if type(finder).__module__ == _autoload.__name__]


def test_installing_again_adds_nothing(registrations: list[str]) -> None:
    """One finder, however often torch and users' imports call install."""
    _autoload.install()
    _autoload.install()
    assert len(hooks()) == 1


def test_module_is_registered_with_after_its_import(registrations: list[str]) -> None:
    """A module that loads after the installation is registered with once, and keeps its own loader."""
    _autoload.install()
    module = importlib.import_module(TARGET)
    assert registrations == [TARGET]
    assert isinstance(module.__loader__, SourceFileLoader)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == SOURCE


def test_module_loaded_before_is_registered_with_at_once(registrations: list[str]) -> None:
    """Lightning came first: nothing has to be imported any more."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in hooks()]
    importlib.import_module(TARGET)
    assert registrations == []
    _autoload.install()
    assert registrations == [TARGET]


def test_reload_registers_again(registrations: list[str]) -> None:
    """importlib.reload executes the module once more and replaces what it holds."""
    _autoload.install()
    module = importlib.import_module(TARGET)
    importlib.reload(module)
    assert module.LOADS == 2
    assert registrations == [TARGET, TARGET]


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


def test_other_finders_that_ask_everybody_else(registrations: list[str]) -> None:
    """A finder that delegates to all others, as this one does, does not send it round in circles."""

    class Delegating:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            others = [finder for finder in sys.meta_path if finder is not self]
            return next((spec for o in others if (spec := o.find_spec(name, path, target))), None)  # type: ignore

    _autoload.install()
    sys.meta_path.append(Delegating())  # type: ignore[arg-type]
    importlib.import_module(TARGET)
    assert registrations == [TARGET]


def test_failed_registration_is_swallowed(
    registrations: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The import of torch or Lightning never fails because of us; a variable shows why the name is missing."""
    monkeypatch.setitem(_autoload._REGISTRARS, TARGET, lambda module: 1 // 0)
    _autoload.install()
    importlib.import_module(TARGET)
    _autoload.install()
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("SMART_INFINITY_AUTOLOAD_DEBUG", "1")
    _autoload.install()
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_failed_installation_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about the interpreter's state makes install raise."""
    monkeypatch.setattr(_autoload, "_install_finder", lambda: 1 // 0)
    _autoload.install()


def test_module_without_registry_is_left_alone() -> None:
    """Another version of Lightning may lack the registry; or its module is still being executed."""
    _autoload._register_with_trainer(ModuleType("lightning.pytorch.strategies"))


def test_name_that_the_user_registered_stays_theirs() -> None:
    """A user may register a preset of their own under the name before discovery comes by."""
    module = ModuleType("lightning.pytorch.strategies")
    module.StrategyRegistry = registry = _StrategyRegistry()  # type: ignore[attr-defined]
    registry.register("smart_infinity", dict, storage="mine")
    _autoload._register_with_trainer(module)
    assert registry.get("smart_infinity") == {"storage": "mine"}


def test_name_of_ours_is_replaced_after_reload() -> None:
    """A reloaded package registers its new factory in place of the stale one."""
    module = ModuleType("lightning.pytorch.strategies")
    module.StrategyRegistry = registry = _StrategyRegistry()  # type: ignore[attr-defined]
    _autoload._register_with_trainer(module)
    stale = registry["smart_infinity"]["strategy"]
    reloaded = importlib.reload(_autoload)
    reloaded._register_with_trainer(module)
    assert registry["smart_infinity"]["strategy"] is reloaded._create_trainer_strategy
    assert registry["smart_infinity"]["strategy"] is not stale


def test_reload_leaves_one_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finder of the stale module is removed."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    _autoload.install()
    importlib.reload(_autoload).install()
    assert len(hooks()) == 1

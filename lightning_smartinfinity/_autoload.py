"""Registers the strategy's name with Lightning: ``Trainer(strategy="smart_infinity")`` needs no other import.

``Fabric(strategy="smart_infinity")`` works the same way, through a registry of its own.

Lightning loads no strategies from entry points. But ``import torch`` calls every entry point of the group
``torch.backends``, and torch is imported before Lightning defines its registries. So :func:`install` puts a finder on
``sys.meta_path`` that registers the strategy after Lightning's module was executed. It runs inside ``import torch``, so
it imports only the standard library and never raises. Set ``SMART_INFINITY_AUTOLOAD_DEBUG=1`` to print its errors.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
    from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy

__all__ = ["install"]

STRATEGY_NAME = "smart_infinity"
# Common misspellings, in lower case, to which Lightning has converted the name.
_OTHER_SPELLINGS = (
    "lightning_smartinfinity.smartinfinitystrategy",  # LightningCLI passes a class path without settings as a name
    "smart infinity",
    "smart-infinity",
    "smart_infinity_strategy",
    "smart_infinty",
    "smartinfinity",
    "smartinfinityfabricstrategy",
    "smartinfinitystrategy",
    "smartinfinty",
)
_DESCRIPTION = "ZeRO-3 with the optimizer state on storage and the update next to it"
_NO_NAME = f"no name of a strategy: write {STRATEGY_NAME!r}"
_DEBUG_VARIABLE = "SMART_INFINITY_AUTOLOAD_DEBUG"


def install() -> None:
    """Register the strategy now if Lightning is loaded, otherwise when it is loaded; safe to call again."""
    try:
        _install_finder()
        for name in _REGISTRARS:
            if name in sys.modules:
                _register(sys.modules[name])
    except Exception:
        _show_swallowed()


def _register_with_trainer(module: ModuleType) -> None:
    _add(getattr(module, "StrategyRegistry", None), _create_trainer_strategy)


def _register_with_fabric(module: ModuleType) -> None:
    _add(getattr(module, "STRATEGY_REGISTRY", None), _create_fabric_strategy)


def _add(registry: Any, factory: Callable[..., object]) -> None:
    # The registry does not exist while another thread still executes the module; the finder registers afterwards.
    if registry is None:
        return
    present = registry[STRATEGY_NAME]["strategy"] if STRATEGY_NAME in registry else None
    if present is None or _is_ours(present):  # keep a strategy that the user registered under this name
        registry.register(STRATEGY_NAME, factory, description=_DESCRIPTION, override=True)
    for spelling in _OTHER_SPELLINGS:
        # Lightning's own error for an unregistered name does not list our name.
        if spelling not in registry or _is_ours(registry[spelling]["strategy"]):
            registry.register(spelling, _refuse, description=_NO_NAME, override=True, spelling=spelling)


def _create_trainer_strategy(**settings: object) -> SmartInfinityStrategy:
    """Create the strategy. A function is registered so that the class and DeepSpeed load only when it is used."""
    import lightning_smartinfinity

    factory: Callable[..., SmartInfinityStrategy] = lightning_smartinfinity.SmartInfinityStrategy
    return factory(**settings)


def _create_fabric_strategy(**settings: object) -> SmartInfinityFabricStrategy:
    """Create the strategy, as :func:`_create_trainer_strategy` does."""
    import lightning_smartinfinity

    factory: Callable[..., SmartInfinityFabricStrategy] = lightning_smartinfinity.SmartInfinityFabricStrategy
    return factory(**settings)


def _refuse(spelling: str) -> NoReturn:
    """Raise ConfigError, which names the right spelling, instead of creating the strategy."""
    import lightning_smartinfinity

    raise lightning_smartinfinity.ConfigError(
        f"strategy={spelling!r} is no name of a strategy.", f"Write strategy={STRATEGY_NAME!r}."
    )


# Lightning's modules that define a registry, each with the function that registers the strategy in it.
_REGISTRARS: dict[str, Callable[[ModuleType], None]] = {
    "lightning.pytorch.strategies": _register_with_trainer,
    "lightning.fabric.strategies": _register_with_fabric,
}


class _RegistrationFinder(importlib.abc.MetaPathFinder):
    """Finds Lightning's modules through the other finders, and makes their loaders register the strategy afterwards."""

    def __init__(self) -> None:
        # Names being searched. A module is searched under its import lock, so by one thread only.
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRARS or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = _find_elsewhere(self, fullname, path, target)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(importlib.abc.Loader):
    """Executes a module as its own loader does, then registers the strategy with it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the module's own loader, which knows its source and resources.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)


def _find_elsewhere(
    finder: _RegistrationFinder, fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    others = [other for other in sys.meta_path if other is not finder and hasattr(other, "find_spec")]
    return next((spec for other in others if (spec := other.find_spec(fullname, path, target)) is not None), None)


def _install_finder() -> None:
    # After importlib.reload, a finder of the old module may remain, which would register outdated classes.
    stale = [f for f in sys.meta_path if _is_ours(type(f)) and not isinstance(f, _RegistrationFinder)]
    for finder in stale:
        sys.meta_path.remove(finder)
    if not any(isinstance(finder, _RegistrationFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistrationFinder())


def _register(module: ModuleType) -> None:
    try:
        _REGISTRARS[module.__name__](module)
    except Exception:
        _show_swallowed()


def _is_ours(item: object) -> bool:
    return getattr(item, "__module__", None) == __name__


def _show_swallowed() -> None:
    if os.environ.get(_DEBUG_VARIABLE, "") not in ("", "0"):
        traceback.print_exc()

"""ZeRO-3 training in Lightning with the optimizer state on storage and the update next to it.

Importing this package loads only the standard library, because it is imported inside ``import torch`` (see
``_autoload``). Every public name is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from lightning_smartinfinity import _autoload, checkpoint_hint

if TYPE_CHECKING:
    from lightning_smartinfinity.errors import (
        CheckpointError,
        CheckpointNotFoundError,
        ConfigError,
        CudaError,
        DeviceError,
        RankLostError,
        RanksDivergedError,
        SmartInfinityError,
        StorageCorruptError,
        StorageError,
        StorageFullError,
        StorageLockedError,
        StorageTimeoutError,
        UnsupportedError,
    )
    from lightning_smartinfinity.integrations.fabric.strategy import SmartInfinityFabricStrategy
    from lightning_smartinfinity.integrations.precision import SmartInfinityPrecision
    from lightning_smartinfinity.integrations.trainer.callbacks import StorageTrafficMonitor
    from lightning_smartinfinity.integrations.trainer.strategy import SmartInfinityStrategy
    from lightning_smartinfinity.resume.random_states import RandomStates
    from lightning_smartinfinity.settings import (
        ActivationOffload,
        BlockScaled,
        PlanConfig,
        SmartSSDConfig,
        TopK,
        TransferConfig,
    )

__version__ = "0.1.0.dev6"

__all__ = [
    "ActivationOffload",
    "BlockScaled",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CudaError",
    "DeviceError",
    "PlanConfig",
    "RandomStates",
    "RankLostError",
    "RanksDivergedError",
    "SmartInfinityError",
    "SmartInfinityFabricStrategy",
    "SmartInfinityPrecision",
    "SmartInfinityStrategy",
    "SmartSSDConfig",
    "StorageCorruptError",
    "StorageError",
    "StorageFullError",
    "StorageLockedError",
    "StorageTimeoutError",
    "StorageTrafficMonitor",
    "TopK",
    "TransferConfig",
    "UnsupportedError",
    "__version__",
]

_HOMES = {
    "ActivationOffload": "settings",
    "BlockScaled": "settings",
    "CheckpointError": "errors",
    "CheckpointNotFoundError": "errors",
    "ConfigError": "errors",
    "CudaError": "errors",
    "DeviceError": "errors",
    "PlanConfig": "settings",
    "RandomStates": "resume.random_states",
    "RankLostError": "errors",
    "RanksDivergedError": "errors",
    "SmartInfinityError": "errors",
    "SmartInfinityFabricStrategy": "integrations.fabric.strategy",
    "SmartInfinityPrecision": "integrations.precision",
    "SmartInfinityStrategy": "integrations.trainer.strategy",
    "SmartSSDConfig": "settings",
    "StorageCorruptError": "errors",
    "StorageError": "errors",
    "StorageFullError": "errors",
    "StorageLockedError": "errors",
    "StorageTimeoutError": "errors",
    "StorageTrafficMonitor": "integrations.trainer.callbacks",
    "TopK": "settings",
    "TransferConfig": "settings",
    "UnsupportedError": "errors",
}

# Old names of modules that documents or pickles contain, and their present names. Submodules are redirected, too.
_MOVED = {
    "callbacks": "integrations.trainer.callbacks",
    "compression": "settings",
    "config": "settings",
    "fabric": "integrations.fabric.strategy",
    "huggingface": "integrations.transformers",
    "metrics": "integrations.trainer.metrics",
    "plan": "planning",
    "precision": "integrations.precision",
    "rng": "resume.random_states",
    "strategy": "integrations.trainer.strategy",
    "transfer": "pipeline",
    "transfer.convert": "pipeline.state.convert",
}


def _now(name: str) -> str | None:
    """Return the present name of a module that has an old name, or None."""
    moved = max((each for each in _MOVED if f"{name}.".startswith(f"{__name__}.{each}.")), key=len, default=None)
    return None if moved is None else f"{__name__}.{_MOVED[moved]}{name[len(__name__) + 1 + len(moved) :]}"


class _Moved:
    """Finds a module by its old name, so that both names denote one module."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or _now(name) is None:
            return None
        return ModuleSpec(name, self)  # type: ignore[arg-type]  # importlib.abc takes time to import

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(_now(spec.name)))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the module's own spec instead of the old name's


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # the next access finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.insert(0, _Moved())  # else a room's own path would find its modules a second time
_autoload.install()
checkpoint_hint.install()

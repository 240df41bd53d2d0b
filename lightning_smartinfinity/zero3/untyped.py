"""Names for untyped values: DeepSpeed's objects, and the contents of its files.

DeepSpeed publishes no types, so a type checker accepts any use of these. This package's own objects have classes.
The values in checkpoints and parameter groups are Any, because they are nested dictionaries that DeepSpeed, torch and
users fill: each value is checked, or given its type, where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = [
    "ClientState",
    "DeepSpeedConfig",
    "ParamGroup",
    "Pickled",
    "SavedState",
    "ZeroCoordinator",
    "ZeroEngine",
    "ZeroInit",
    "ZeroModule",
    "ZeroOffload",
    "ZeroOptimizer",
    "ZeroParameter",
]

ZeroEngine: TypeAlias = Any
"""A ``DeepSpeedEngine``, of which only DeepSpeed's own attributes and methods are used."""

ZeroOptimizer: TypeAlias = Any
"""A ``DeepSpeedZeroOptimizer_Stage3``, of which only DeepSpeed's own attributes are read."""

ZeroParameter: TypeAlias = Any
"""A ``torch.nn.Parameter`` that ZeRO-3 has partitioned, with attributes such as ``ds_id`` and ``ds_tensor``."""

ZeroModule: TypeAlias = Any
"""A ``torch.nn.Module`` with attributes that ZeRO-3's hooks set, such as ``ds_id`` and ``_external_params``."""

ZeroOffload: TypeAlias = Any
"""A ``DeepSpeedZeRoOffload``, whose module hooks gather and release parameters."""

ZeroCoordinator: TypeAlias = Any
"""A ``PartitionedParameterCoordinator``, which gathers the parameters of a module and of the next ones."""

ZeroInit: TypeAlias = Any
"""A ``deepspeed.zero.Init``, which partitions parameters as modules are built."""

DeepSpeedConfig: TypeAlias = dict[str, Any]
"""DeepSpeed's configuration, or a section of it."""

Pickled: TypeAlias = Any
"""The result of ``torch.load`` for a checkpoint's file: states by name, or a tensor."""

SavedState: TypeAlias = Mapping[str, Any]
"""States by name, as DeepSpeed, Lightning or torch saves them in a checkpoint."""

ClientState: TypeAlias = dict[str, Any]
"""State that Lightning or a user saves with the model; the receiver may change it."""

ParamGroup: TypeAlias = dict[str, Any]
"""One of torch's ``Optimizer.param_groups``: parameters and hyperparameters by name."""

"""Exports the weights of a module that is being trained, was trained or is evaluated."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_smartinfinity.common.transformers_models import describe, models_in
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.export.companions import Origin, origin_of
from lightning_smartinfinity.export.destination import require_folder, resolved
from lightning_smartinfinity.export.models import choose
from lightning_smartinfinity.export.pretrained import FolderExport, plain_export, pretrained_export, writing_folder
from lightning_smartinfinity.export.routes import DTYPES
from lightning_smartinfinity.export.shards import SHARD_SIZE
from lightning_smartinfinity.settings.rules import Rule, check, optional
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import Put
from lightning_smartinfinity.zero3.checkpoints.save.live_weights import LiveWeights
from lightning_smartinfinity.zero3.optimizer.release import trainings_of
from lightning_smartinfinity.zero3.ranks.collectives import raising_together

__all__ = ["save_module"]

_DTYPE = optional(
    Rule(
        f"Pass one of {', '.join(map(str, DTYPES.values()))}, since others would lose trained weights",
        lambda value: value in DTYPES.values(),
    )
)


def save_module(
    module: torch.nn.Module,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Save the only model of transformers in a module, or the module itself if there is none. This is a collective.

    Rank 0 writes.

    Args:
        module: The module.
        target: Path of the folder. If it exists, its files stay, except for older weights.
        dtype: Dtype of trained weights, one of :data:`DTYPES`; None for the dtype of training, with the same bits.
        max_shard_size: Bytes of a file, or text such as ``"5GB"``; None means transformers' default.

    Raises:
        SmartInfinityError: The module cannot be saved, or the folder cannot be written; raised on every rank.
    """
    export: FolderExport | None = None
    with raising_together():
        check("save_pretrained", "dtype", dtype, _DTYPE)
        check("save_pretrained", "max_shard_size", max_shard_size, optional(SHARD_SIZE))
        target = resolved(target)
        require_folder(target)
        _require_outside_storage(module, target)
        _require_values(module)
        source, export = _planned(module, dtype=dtype, max_shard_size=max_shard_size)
    assert export is not None
    with ExitStack() as written:
        put: Put = _nowhere
        with raising_together():
            if dist.get_rank() == 0:
                put = written.enter_context(writing_folder(target, export, keeps_others=True))
        source.read(export.names, put, masters=_needs_masters(export))
        with raising_together():
            written.close()


def _planned(
    module: torch.nn.Module, *, dtype: torch.dtype | None, max_shard_size: int | str | None
) -> tuple[LiveWeights, FolderExport]:
    models = models_in(module)
    name = choose(models, None, option="module=...")
    if name is None:
        source = LiveWeights(module)
        return source, plain_export(source.contents, dtype=dtype, max_shard_size=max_shard_size)
    model = models[name]
    source, description = LiveWeights(model), describe(model)
    origins = origin_of(description, Origin)
    return source, pretrained_export(
        model, description, source.contents, dtype=dtype, origins=origins, max_shard_size=max_shard_size
    )


def _require_outside_storage(module: torch.nn.Module, target: Path) -> None:
    """Check that the folder neither is in a job's folder of the module's trainings, nor contains their storage."""
    for training in trainings_of(module):
        offload = training._offload
        for folder in offload.storage if training.rank_state.is_open else ():
            storage = Path(os.path.realpath(folder))
            if target.is_relative_to(storage / offload.transfer.job) or storage.is_relative_to(target):
                raise ConfigError(
                    f"save_pretrained cannot write {target}: the training keeps its optimizer state in "
                    f"{storage / offload.transfer.job}.",
                    "Name a folder elsewhere.",
                )


def _require_values(module: torch.nn.Module) -> None:
    """Check that every weight has values: moving a partitioned module to "meta" creates new, empty parameters."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta or _lost_its_partition(tensor):
            raise UnsupportedError(
                f"{name!r} of {type(module).__name__} has no values: it is empty or on the device 'meta', for example "
                "after module.to('meta').",
                "Call save_pretrained before its parameters are moved or replaced, or export a checkpoint by "
                "`smart-infinity export`.",
            )


def _lost_its_partition(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the shape of ZeRO-3's empty parameters, but is unknown to ZeRO-3."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return is_parameter and tensor.shape == (0,) and not hasattr(tensor, "ds_id")


def _needs_masters(export: FolderExport) -> bool:
    """Return whether the dtype differs from the parameters'. If it does not, they equal their rounded masters."""
    parameters = export.contents.parameters.values()
    return any(spec.trained and spec.dtype.is_floating_point and spec.dtype != export.dtype for spec in parameters)


def _nowhere(name: str, begin: int, values: torch.Tensor) -> None:
    raise AssertionError("only the first rank collects values")

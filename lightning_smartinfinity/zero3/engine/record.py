"""The engine's part of a training record: DeepSpeed's and the module's state without parameters and optimizer state."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.distributed as dist

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.formats.saved_residual import begin_residual
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import persistent_buffers
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.module_guard import refuse_late_parameters
from lightning_smartinfinity.zero3.parameters.param_swapper import stored_parameter
from lightning_smartinfinity.zero3.ranks.collectives import gather
from lightning_smartinfinity.zero3.untyped import SavedState, ZeroParameter

__all__ = [
    "crc32c_of_both",
    "describe_engine",
    "frozen_checksum",
    "restore_engine",
]


_POLYNOMIAL = 0x82F63B78  # Castagnoli's; the lowest bit belongs to the highest power, as in all numbers below
_ONE = 1 << 31
_AFTER_A_BYTE = 1 << 23  # x to the power of 8


def crc32c_of_both(first: int, second: int, nbytes: int) -> int:
    """Return the CRC32C of two concatenated pieces of data.

    Args:
        first: CRC32C of the first piece.
        second: CRC32C of the second piece.
        nbytes: Size of the second piece, in bytes.
    """
    return _product(_power(nbytes), first) ^ second


@cache
def _power(nbytes: int) -> int:
    """Return the polynomial by which ``nbytes`` further bytes multiply a CRC."""
    power, square = _ONE, _AFTER_A_BYTE
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square, nbytes = _product(square, square), nbytes >> 1
    return power


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials over GF(2), modulo CRC32C's polynomial."""
    product = 0
    # CRC32C reflects its bits: bit 31 is the constant term, and a shift to the right multiplies by x.
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product


_log = logging.getLogger(__name__)

_CHUNK_NUMEL = 1 << 22  # elements that are copied from a GPU at a time
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def describe_engine(engine: SmartInfinityEngine) -> SavedState:
    """Return the engine's part of a training record; its tensors share memory with the engine's.

    The caller adds :func:`frozen_checksum` as ``"frozen"``, once, because it does not change.
    """
    optimizer = engine.optimizer
    return {
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
        "groups": [_without_parameters(group) for group in optimizer.optimizer.param_groups],
        "configured": optimizer.configured,
        "loss_scaler": numbers_of(optimizer.loss_scaler),
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "buffers": {name: value.detach() for name, value in persistent_buffers(engine.module)},
    }


def restore_engine(engine: SmartInfinityEngine, saved: SavedState, *, frozen: int) -> None:
    """Continue with an engine's part of a training record.

    Args:
        engine: The engine.
        saved: Its part of the record.
        frozen: :func:`frozen_checksum` of its module.

    Raises:
        StorageCorruptError: The residual of compressed gradients is damaged.
        CheckpointError: The module's buffers, or the values of its untrained parameters, differ from the record's.
    """
    optimizer = engine.optimizer
    if saved["frozen"] != frozen:
        raise CheckpointError(
            "The parameters that are not trained have other values than in the training that was interrupted, and "
            "storage holds none of theirs.",
            "Build the model with the weights that it had, for instance from the same pretrained ones.",
        )
    buffers = {name: value.detach() for name, value in persistent_buffers(engine.module)}
    differing = sorted(
        name
        for name in buffers.keys() | saved["buffers"].keys()
        if name not in buffers or name not in saved["buffers"] or buffers[name].shape != saved["buffers"][name].shape
    )
    if differing:
        raise CheckpointError(
            f"The module's buffer {differing[0]!r} differs from that of the training that was interrupted.",
            "Build the model as it was.",
        )
    for name, values in saved["buffers"].items():
        buffers[name].copy_(values)
    if not optimizer.own_hyperparameters:
        for group, values in zip(optimizer.optimizer.param_groups, saved["groups"], strict=True):
            group.update(values)
        optimizer.configured = saved.get("configured", optimizer.configured)
    for name, value in saved["counters"].items():
        setattr(engine, name, value)
    optimizer.loss_scaler = loss_scaler_of(saved["loss_scaler"])
    optimizer.dynamic_loss_scale = saved["dynamic_loss_scale"]
    optimizer.overflow = saved["overflow"]
    _restore_residual(optimizer)


def _restore_residual(optimizer: StorageOptimizer) -> None:
    rank_state = optimizer.rank_state
    record, residual = rank_state.handler.training, rank_state.residual
    assert record is not None
    if residual is not None and residual.numel() == record.residual_numel:
        rank_state.handler.read_residual(residual.numpy())
        return
    begin_residual(optimizer, source="the training that was interrupted")
    if residual is None and record.residual_numel and dist.get_rank() == 0:
        _log.warning("The residual of compressed gradients on storage is left out: there is no compression.")


def frozen_checksum(module: torch.nn.Module) -> int:
    """Return a checksum of the untrained parameters that is the same for any number of ranks. Collective."""
    refuse_late_parameters(module)
    frozen = [param for param in module.parameters() if not param.requires_grad]
    crc = 0
    # The ranks hold consecutive parts of each parameter.
    for parts in zip(*gather([_checksum_of(_partition_of(param)) for param in frozen], None), strict=True):
        for of_part, nbytes in parts:
            crc = crc32c_of_both(crc, of_part, nbytes)
    return crc


def _checksum_of(values: torch.Tensor) -> tuple[int, int]:
    """Return the CRC32C of values, and their size in bytes."""
    crc = 0
    for begin in range(0, values.numel(), _CHUNK_NUMEL):
        chunk = values[begin : begin + _CHUNK_NUMEL].cpu().contiguous()
        crc = native.crc32c(chunk.data_ptr(), chunk.nbytes, crc)
    return crc, values.nbytes


def _partition_of(param: ZeroParameter) -> torch.Tensor:
    if stored_parameter(param) is not None:
        whole: torch.Tensor = param.nvme_swapper.read_partition(param)
    else:
        whole = param.ds_tensor.detach()
    # The padding at the end of the last ranks' partitions was never initialised.
    numel = int(param.partition_numel())
    return whole.reshape(-1)[: max(0, min(numel, int(param.ds_numel) - dist.get_rank() * numel))]


def _without_parameters(group: SavedState) -> SavedState:
    return {key: value for key, value in group.items() if key != "params"}

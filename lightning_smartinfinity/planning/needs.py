"""Computes the bytes that a training needs in GPU memory, host memory and on disk, by phase and owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lightning_smartinfinity.pipeline.layout.gradient_ring import MOST_ON_DEVICE_BYTES, ring_bytes
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    ParameterSlice,
    PartitionLayout,
    build_layout,
    with_residents,
)
from lightning_smartinfinity.planning.memory import compressed_bytes
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.storage.extents import BLOCK_BYTES, ExtentMap
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.storage.state.space import overhead_bytes
from lightning_smartinfinity.storage.tensors.tensor_files import deal, whole_blocks

__all__ = [
    "CUDA_CONTEXT_BYTES",
    "CUDA_HOST_BYTES",
    "ENGINE_BYTES",
    "PROCESS_BYTES",
    "MemoryKind",
    "Need",
    "activation_owners",
    "building_owners",
    "checkpoint_bytes",
    "held_by_update",
    "held_gradient_bytes",
    "layout_of",
    "least_gradient_budget",
    "least_parameter_budget",
    "needs",
    "pinned_partition_bytes",
    "spilled_gradient_bytes",
    "state_bytes",
    "stored_bytes",
]

PROCESS_BYTES = 620_000_000
"""Resident memory of a training process without model and update: imports, threads, engine and kernels.

From ``benchmarks/plan.py --sizes 20M`` with a CPU build of torch 2.13; other builds need more.
"""

ENGINE_BYTES = 180_000_000
"""Part of :data:`PROCESS_BYTES` for the engine, its threads and kernels, which start after the model was built.

From ``benchmarks/plan.py --sizes 355M 1.1B``.
"""

CUDA_CONTEXT_BYTES = 600_000_000
"""Memory of the driver and of libraries on a GPU; assumed."""

CUDA_HOST_BYTES = 1_400_000_000
"""Host memory of the driver and of libraries in a process with a GPU.

From ``benchmarks/gpu_step.py --size 355M`` on an H100 with torch 2.11 (CUDA 13.0).
"""

_PREFETCH_NUMEL = 5 * 10**7  # DeepSpeed's stage3_prefetch_bucket_size
_KEPT_NUMEL = 10**5  # DeepSpeed's stage3_param_persistence_threshold: parameters up to this are not stored
_PARAMETER_BUFFERS = 5  # DeepSpeed's offload_param.buffer_count
_LEAST_STORED = 2048  # zero3/parameters/param_swapper.py
_TRANSFER_BYTES = (12 << 20) + BLOCK_BYTES  # pipeline/state/part_transfers.py: most bytes of an update in flight
_CHECKPOINT_FILES = 64 * 1024  # bytes of a checkpoint besides its tensors: archives' directories, configuration, groups
_CHECKPOINT_BYTES_PER_PARAMETER = 256


class MemoryKind(Enum):
    """The kind of memory that holds bytes."""

    GPU = "GPU memory"
    HOST = "host memory"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes needed at once in one kind of memory.

    Args:
        place: The kind of memory.
        phase: Phase of the training: "building", "training" or "saving"; for the disk "in all".
        owners: Bytes by owner.
    """

    place: MemoryKind
    phase: str
    owners: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all owners."""
        return sum(self.owners.values())

    @property
    def largest(self) -> str:
        """The owner of the most bytes."""
        return max(self.owners, key=self.owners.__getitem__)


def needs(model: ModelFigures, training: Training, *, on_gpu: bool, process_bytes: int = PROCESS_BYTES) -> list[Need]:
    """Return the needs of a training.

    Host memory and disk are totals of all processes of one machine; GPU memory is that of one GPU.

    Args:
        model: The model.
        training: The training.
        on_gpu: Whether each process computes on a GPU of its own; otherwise the CPU computes.
        process_bytes: Host memory of a process before it trains, as in :class:`Resources`.
    """
    found = list(_gpu_needs(model, training)) if on_gpu else []
    for phase, owners in _host_phases(model, training, on_gpu=on_gpu, process_bytes=process_bytes):
        of_all = {owner: nbytes * training.processes for owner, nbytes in owners.items() if nbytes}
        found.append(Need(place=MemoryKind.HOST, phase=phase, owners=of_all))
    return [*found, Need(place=MemoryKind.DISK, phase="in all", owners=_disk_owners(model, training))]


def _gpu_needs(model: ModelFigures, training: Training) -> Iterator[Need]:
    held = {"CUDA context": CUDA_CONTEXT_BYTES, "buffers": model.buffer_bytes}
    if training.offload_param == "none":
        held["parameters"] = training.item_bytes * _share(model.numel, training)
    cast = training.built_bytes * model.largest
    yield Need(place=MemoryKind.GPU, phase="building", owners={**held, "parameter being partitioned": cast})
    held["gathered layers"] = training.item_bytes * _gathered_numel(model, training)
    held["gradient bucket"] = 2 * training.item_bytes * max(training.bucket_numel, model.largest)
    share = training.item_bytes * _share(model.largest, training)
    held["gradients on their way"] = min(_bytes_of(model.trained, training), max(MOST_ON_DEVICE_BYTES, share))
    yield Need(place=MemoryKind.GPU, phase="training", owners={**held, **activation_owners(model, training)})


def _gathered_numel(model: ModelFigures, training: Training) -> int:
    """Return the most elements that are gathered on a GPU in addition to its own partition."""
    if training.world_size == 1 and training.offload_param == "none":
        return 0  # the partition of a single process is the parameter
    if training.parameter_budget is not None:
        return min(model.numel, training.parameter_budget // training.item_bytes)
    # The strategy keeps no parameter gathered for a later use (stage3_max_reuse_distance).
    return min(model.numel, model.largest_module + _PREFETCH_NUMEL)


def least_gradient_budget(model: ModelFigures, training: Training) -> int:
    """Return the least budget of gradients that the update accepts."""
    return layout_of(model.trained, training).least_gradient_budget(training.gradient_itemsize)


def least_parameter_budget(model: ModelFigures, training: Training, *, on_gpu: bool) -> int:
    """Return approximately the least budget of parameters with which the largest module can be gathered."""
    holders = training.world_size if on_gpu or training.world_size == 1 else training.world_size + 1
    return holders * training.item_bytes * -(-model.largest_module // training.world_size)


def activation_owners(model: ModelFigures, training: Training) -> dict[str, int]:
    """Return the bytes of activations and logits of one process; empty if they could not be counted."""
    passes = model.passes_of(training.batch)
    if passes is None:
        return {}
    scale = training.item_bytes / passes.item_bytes
    nbytes = passes.activation_bytes(checkpointing=training.checkpointing, num_layers=model.num_layers)
    return {"activations": int(nbytes * scale), "logits": passes.logits_bytes}


def _host_phases(
    model: ModelFigures, training: Training, *, on_gpu: bool, process_bytes: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the phases of one process, each with its host memory by owner."""
    process = {"process": process_bytes, "CUDA libraries": CUDA_HOST_BYTES if on_gpu else 0}
    held = {**process, **_held_parameters(model, training, on_gpu=on_gpu)}
    update = held_by_update(model, training, on_gpu=on_gpu)
    imported = {**process, "process": process_bytes - ENGINE_BYTES}
    building = {**imported, **building_owners(model, training, on_gpu=on_gpu)}
    # After the model is partitioned, and before there are gradients, the first state is written through the ring.
    slots = training.num_buffers * layout_of(model.trained, training).extents.place_bytes
    writing = {**held, "ring": slots}
    moving = {**held, **_moved_partitions(model, training, on_gpu=on_gpu)}
    yield "building", max(building, writing, moving, key=lambda owners: sum(owners.values()))
    computing = {} if on_gpu else {**activation_owners(model, training), "buffers": model.buffer_bytes}
    if not on_gpu and training.world_size > 1 and training.parameter_budget is None:
        computing["gathered layers"] = training.item_bytes * _gathered_numel(model, training)
    yield "training", {**held, **update, **computing}
    # Between steps there are no activations. The state moves through a window as large as the ring.
    yield "saving", {**held, **update, "window": slots}


def building_owners(model: ModelFigures, training: Training, *, on_gpu: bool) -> dict[str, int]:
    """Return the host memory of one process while it builds and partitions the model.

    A model built in ``__init__`` exists as a whole, and the largest parameter a second time while it is cast. The
    result assumes that the memory of a cast parameter returns to the system at once; it is too low if the C library
    keeps that memory. In ``configure_model`` only the largest parameter exists as a whole, in addition to the
    partitioned ones.
    """
    cast = training.item_bytes * model.largest
    if training.build == "init":
        return {"whole model": training.built_bytes * model.numel, "parameter being cast": cast}
    return {**_held_parameters(model, training, on_gpu=on_gpu), "parameter being built": 4 * model.largest + cast}


def _held_parameters(model: ModelFigures, training: Training, *, on_gpu: bool) -> dict[str, int]:
    whole = training.item_bytes * _share(model.numel, training)
    if training.offload_param == "nvme":
        kept = sum(training.item_bytes * n for n in _shares(model, training) if not _is_stored(n, training))
        stored = stored_bytes(model, training)
        largest = training.item_bytes * _share(model.largest, training)
        buffers = training.parameter_budget or _PARAMETER_BUFFERS * whole_blocks(largest)
        return {"parameters": kept, "parameter buffers": min(buffers, stored) + min(_TRANSFER_BYTES, stored)}
    if not on_gpu:
        return {"parameters": whole}
    if training.offload_param == "none":
        return {}
    trained, frozen = (_bytes_of(numels, training) for numels in (model.trained, model.frozen))
    if not training.pin_memory:
        return {"parameters": _pinned(trained) + frozen}
    # The partitions of trained parameters were copied into one buffer, and torch keeps the memory that they had.
    return {"parameters": _pinned(trained), "pinned partitions": pinned_partition_bytes(model, training)}


def pinned_partition_bytes(model: ModelFigures, training: Training) -> int:
    """Return the bytes that one process with a GPU pins with ``pin_memory``, for partitions in host memory."""
    return sum(_pinned(training.item_bytes * share) for share in _shares(model, training))


def _pinned(nbytes: int) -> int:
    """Return the bytes that torch takes for pinned memory: a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _moved_partitions(model: ModelFigures, training: Training, *, on_gpu: bool) -> dict[str, int]:
    """Return the partitions in host memory that exist a second time, while DeepSpeed copies them into one buffer."""
    moves = on_gpu and training.offload_param == "cpu" and not training.pin_memory
    return {"partitions being moved": _bytes_of(model.trained, training)} if moves else {}


def _bytes_of(numels: Iterable[int], training: Training) -> int:
    return training.item_bytes * sum(_share(numel, training) for numel in numels)


def held_by_update(model: ModelFigures, training: Training, *, on_gpu: bool = False) -> dict[str, int]:
    """Return the host memory of the update in one process, by the purposes of ``strategy.host_bytes``.

    With parameters on storage or on a GPU, the ring includes the staging buffer or the slots. With gradients on storage
    it also includes the memory into which the update reads them, which their budget does not include. State in memory
    has as many slots again.
    """
    layout = layout_of(model.trained, training)
    extents = layout.extents
    ring = training.num_buffers * extents.place_bytes
    slots = training.num_buffers * (2 if training.cache_bytes else 1)
    if training.offload_param == "nvme":
        ring += _staging_bytes(extents, training, limit=ring)
    elif on_gpu and training.offload_param == "none":
        ring += slots * training.item_bytes * min(extents.tasklet_numel, extents.numel)
    if spilled_gradient_bytes(model, training):
        ring += slots * whole_blocks(training.gradient_itemsize * min(extents.tasklet_numel, extents.numel))
    held = {"ring": ring, "gradient_arena": held_gradient_bytes(layout, training)}
    if on_gpu:
        held["gradient_ring"] = ring_bytes(training.gradient_itemsize * layout.numel)
    if training.cache_bytes:
        held["state in memory"] = min(training.cache_bytes, state_bytes(model, training))
    if training.payload is None:
        return held
    return held | compressed_bytes(training.payload, layout, error_feedback=training.keeps_residual)


def state_bytes(model: ModelFigures, training: Training) -> int:
    """Return the bytes of one generation of one process's optimizer state."""
    return sum(extent.nbytes for extent in layout_of(model.trained, training).extents.extents)


def held_gradient_bytes(layout: PartitionLayout, training: Training) -> int:
    """Return the bytes of gradients that the arena holds in memory: all, or their budget."""
    whole = training.gradient_itemsize * layout.numel
    if training.gradient_budget is None:
        return whole
    return min(whole, max(training.gradient_budget, layout.least_gradient_budget(training.gradient_itemsize)))


def spilled_gradient_bytes(model: ModelFigures, training: Training) -> int:
    """Return the bytes of one process's gradients that every micro-batch writes to storage and reads back."""
    if training.gradient_budget is None:
        return 0
    return max(0, training.gradient_itemsize * layout_of(model.trained, training).numel - training.gradient_budget)


def _staging_bytes(extents: ExtentMap, training: Training, *, limit: int) -> int:
    """Return the bytes of the staging buffer, whose rows hold a tasklet's parameters on their way to storage."""
    row = training.item_bytes * extents.tasklet_numel
    return row * max(1, min(max(2, limit // row), extents.num_tasklets))


def _disk_owners(model: ModelFigures, training: Training) -> dict[str, int]:
    layout = layout_of(model.trained, training)
    records = overhead_bytes(layout.extents.num_tasklets, len(model.trained))
    owners = {"optimizer state": training.processes * _file_bytes(layout, training)}
    if training.offload_param == "nvme":
        owners["parameters"] = training.processes * stored_bytes(model, training)
    if spilled_gradient_bytes(model, training):
        owners["gradients"] = training.processes * training.gradient_itemsize * layout.numel
    owners["records"] = training.processes * records
    if training.keeps_residual:
        owners["residuals"] = training.processes * residual_bytes(layout.numel)
    if training.saves_beside:
        owners["state being saved"] = owners["optimizer state"] // training.places
    if training.save_top_k:
        one = checkpoint_bytes(model, training)
        owners |= {"checkpoints": training.save_top_k * one, "checkpoint being saved": one}
    return {**owners, "export": training.item_bytes * model.numel}


def _file_bytes(layout: PartitionLayout, training: Training) -> int:
    """Return the bytes of one process's places for state: if it is written back, three for state not in memory."""
    extents = layout.extents
    if not training.writes_back:
        return extents.file_bytes(0)
    num_resident = with_residents(layout, nbytes=training.cache_bytes, written_through=True).num_resident
    return extents.file_bytes(0) + extents.place_offset(extents.num_tasklets - num_resident)


def checkpoint_bytes(model: ModelFigures, training: Training) -> int:
    """Return the bytes that the processes of a machine save: fp32 masters and arrays, and frozen weights and buffers.

    The rest of a checkpoint is estimated: for each process, 64 KiB, and 256 bytes for each parameter.
    """
    padded = training.processes * layout_of(model.trained, training).numel
    frozen = training.item_bytes * sum(model.frozen) + model.buffer_bytes
    small = training.processes * (
        _CHECKPOINT_FILES + _CHECKPOINT_BYTES_PER_PARAMETER * (len(model.trained) + len(model.frozen))
    )
    return 4 * training.num_arrays * padded + frozen + small


def stored_bytes(model: ModelFigures, training: Training) -> int:
    """Return the bytes of one process's parameters on storage with ``offload_param="nvme"``."""
    stored = (training.item_bytes * n for n in _shares(model, training) if _is_stored(n, training))
    return deal(stored, 1)[0]


def layout_of(trained: tuple[int, ...], training: Training) -> PartitionLayout:
    """Return the layout of one process's partition in one storage folder."""
    return _layout(
        trained,
        training.world_size,
        tasklet_bytes=training.tasklet_bytes,
        num_arrays=training.num_arrays,
        places_per_tasklet=training.places,
        state_format=training.state_format,
    )


@lru_cache(maxsize=32)
def _layout(trained: tuple[int, ...], processes: int, **how: int | str) -> PartitionLayout:
    slices = [
        ParameterSlice(name="", numel=-(-n // processes), real_numel=-(-n // processes), group=0, sub_group=0)
        for n in trained
    ]
    return build_layout(slices, num_devices=1, **how)  # type: ignore[arg-type]


def _shares(model: ModelFigures, training: Training) -> list[int]:
    return [-(-n // training.world_size) for n in (*model.trained, *model.frozen)]


def _is_stored(share: int, training: Training) -> bool:
    kept = _KEPT_NUMEL if training.parameter_budget is None else 0
    return share >= _LEAST_STORED and (share - 1) * training.world_size + 1 > kept


def _share(numel: int, training: Training) -> int:
    return -(-numel // training.world_size)

"""Opens a rank's optimizer state on storage, together with all other ranks."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity import native
from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.devices import StorageDevice
from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, StorageError
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.free_memory import measure_memory, share_of_memory
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    ParameterSlice,
    PartitionLayout,
    build_layout,
)
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory
from lightning_smartinfinity.pipeline.rules import UpdateRule, rule_for
from lightning_smartinfinity.settings import launched_as
from lightning_smartinfinity.storage import (
    PARAMETERS,
    SPILLED_GRADIENTS,
    ExtentMap,
    SpaceRequest,
    StateStore,
    StoreDescription,
    TensorStore,
    create_store,
    measure_activation_space,
    measure_gradient_space,
    measure_residual_space,
    measure_space,
    measure_tensor_space,
    require_space,
)
from lightning_smartinfinity.storage.extents import BLOCK_BYTES
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.storage.jobs.archiving import Plan
from lightning_smartinfinity.zero3.ranks.collectives import gather, raise_together, raising_together, show_on_rank_zero
from lightning_smartinfinity.zero3.ranks.file_systems import network_warning, places_of
from lightning_smartinfinity.zero3.settings import OffloadSettings, ParameterSettings
from lightning_smartinfinity.zero3.setup.archiving import archive, plan_moves, put_together, space_of
from lightning_smartinfinity.zero3.setup.rank_migration import (
    Predecessor,
    fill_successor,
    find_predecessor,
    make_way,
    plan_way,
)
from lightning_smartinfinity.zero3.setup.reopening import describe_training, recover_for_training
from lightning_smartinfinity.zero3.setup.state_in_memory import with_cache
from lightning_smartinfinity.zero3.setup.update_device import card_file_bytes, make_device
from lightning_smartinfinity.zero3.untyped import ParamGroup

__all__ = ["gradient_store", "open_storage", "require_parameter_space", "with_gradient_budget"]


def open_storage(
    settings: OffloadSettings,
    layout: PartitionLayout,
    rule: UpdateRule,
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    groups: Sequence[ParamGroup],
    masters: ParameterMemory,
    first_values: Sequence[float],
    memory: Sequence[native.HostBuffer],
    group: ProcessGroup | None,
) -> TransferHandler:
    """Create the store, open the device and write the first generation; or open the store of an interrupted training.

    Collective: if it fails on one rank, it raises on every rank, and every rank removes the files that it created.

    Args:
        settings: Folders and transfer settings, the same on all ranks.
        layout: This rank's partition.
        rule: The optimizer's update rule.
        dtype: Dtype of the parameters.
        gradient_dtype: Dtype of the gradient arena.
        groups: The optimizer's parameter groups, for the manifest.
        masters: This rank's partition, which is widened to the masters.
        first_values: Initial values of the other arrays.
        memory: Memory for the resident tasklets (:func:`~.state_in_memory.claim_cache`).
        group: Process group of all ranks.

    Raises:
        StorageError: A folder cannot be used, is locked or has too little space; raised on every rank.
        DeviceError: A card cannot be opened or has too little memory; raised on every rank.
    """
    settings = replace(settings, gradient_itemsize=gradient_dtype.itemsize, parameter_itemsize=dtype.itemsize)
    description = describe_training(layout, rule, dtype, groups, tasklet_bytes=settings.tasklet_bytes)
    _warn_of_network(settings, group)
    device = partial(make_device, settings, layout.extents, rule.name, memory)
    if settings.resumes:
        return _reopen_storage(settings, layout, rule, description, device, group)
    moves = plan_moves(settings, group)
    require_space(_space_of_all_ranks(settings, layout, moves, group))
    archive(moves, settings, group)
    job_id = gather(uuid.uuid4().bytes, group)[0]
    opened = ExitStack()
    error: SmartInfinityError | None = None
    try:
        store = _create_store(settings, layout, description, group, job_id)
        opened.callback(store.close, remove=True)
        handler = TransferHandler(layout, store, device(), rule=rule)
        opened.callback(handler.close, remove=True)
        handler.open()
        handler.initialize(masters, first_values=first_values, show=show_on_rank_zero)
    except SmartInfinityError as caught:
        error = caught
    except Exception as caught:
        # Any error must reach the other ranks, which would otherwise wait for this one.
        error = StorageError(f"Storage could not be opened: {caught!r}.", "Free memory or use another folder.")
    with opened:
        raise_together(error, group)
        opened.pop_all()
    return handler


def _reopen_storage(
    settings: OffloadSettings,
    layout: PartitionLayout,
    rule: UpdateRule,
    description: StoreDescription,
    device: Callable[[], StorageDevice],
    group: ProcessGroup | None,
) -> TransferHandler:
    """Open the store of an interrupted training at the newest record that all ranks have. Collective."""
    requests: list[SpaceRequest] = []
    with raising_together(group), io_limit(settings.transfer.io_timeout):
        requests = _unnamed_space(settings, layout.extents)
    require_space(_of_all_ranks(requests, group))
    predecessor = find_predecessor(settings, description, group)
    if predecessor is not None:
        return _migrate(predecessor, settings, layout, rule, description, device, group)
    with ExitStack() as opened:
        with raising_together(group):
            store = recover_for_training(settings, layout, description, group)
            opened.callback(store.close, remove=False)
            handler = TransferHandler(layout, store, device(), rule=rule)
            opened.callback(handler.close, remove=False)
            handler.open()
        opened.pop_all()
    return handler


def _warn_of_network(settings: OffloadSettings, group: ProcessGroup | None) -> None:
    """Warn once on each machine whose state would be transferred over the network."""
    folders, warning = settings.storage, None
    with raising_together(group), io_limit(settings.transfer.io_timeout):
        warning = limited("Looking at", folders[0], network_warning, folders)
    if warning is not None and launched_as() == "0":
        warnings.warn(warning, stacklevel=2)


def _migrate(
    predecessor: Predecessor,
    settings: OffloadSettings,
    layout: PartitionLayout,
    rule: UpdateRule,
    description: StoreDescription,
    device: Callable[[], StorageDevice],
    group: ProcessGroup | None,
) -> TransferHandler:
    """Create this rank's store, fill it from the stores of another number of ranks, and delete those. Collective."""
    job_id = gather(uuid.uuid4().bytes, group)[0]
    plan = plan_way(predecessor, settings, job_id)
    make_way(
        plan,
        predecessor,
        settings,
        group,
        require_room=lambda: require_space(_space_of_all_ranks(settings, layout, plan, group)),
    )
    with ExitStack() as opened:
        with raising_together(group):
            store = _create_store(settings, layout, description, group, job_id)
            opened.callback(store.close, remove=True)
            handler = TransferHandler(layout, store, device(), rule=rule)
            opened.callback(handler.close, remove=True)
            handler.open()
        fill_successor(predecessor, settings, layout, handler.state, store, group)
        opened.pop_all()
    with ExitStack() as opened:
        opened.callback(handler.close, remove=False)
        put_together(settings, group)
        opened.pop_all()
    return handler


def with_gradient_budget(
    settings: OffloadSettings, layout: PartitionLayout, *, itemsize: int, group: ProcessGroup | None
) -> OffloadSettings:
    """Return the settings with the memory budget of gradients, in bytes, from ``gradient_bytes``. Collective.

    Raises:
        ConfigError: The budget is too small, or another setting needs all gradients in memory; raised on every rank.
    """
    wanted, nbytes = settings.transfer.gradient_bytes, layout.numel * itemsize
    if isinstance(wanted, str):
        ring = settings.num_buffers * max(settings.tasklet_bytes, layout.extents.place_bytes)
        own = measure_memory(reserved=ring)
        free = share_of_memory(gather(own, group), own)
        needs_all = _needs_all_gradients(settings, layout, itemsize=itemsize) is not None
        if not any(gather(nbytes > free, group)) or any(gather(needs_all, group)):
            return settings
        return replace(settings, gradient_budget=max(free // 2, layout.least_gradient_budget(itemsize)))
    if not any(gather(wanted < nbytes, group)):
        return settings
    with raising_together(group):
        _require_budget(settings, layout, wanted, itemsize=itemsize)
    return replace(settings, gradient_budget=wanted)


def _needs_all_gradients(settings: OffloadSettings, layout: PartitionLayout, *, itemsize: int) -> str | None:
    """Return why all gradients must be in memory, or None."""
    if settings.cards is not None:
        return "SmartSSDs take gradients from host memory"
    if settings.compression is not None:
        return f"compression={settings.compression!r} reads all gradients again"
    if layout.extents.num_tasklets > 1 and layout.extents.tasklet_numel * itemsize % BLOCK_BYTES:
        return "an earlier version has cut the state into tasklets whose gradients are not whole blocks"
    return None


def _require_budget(settings: OffloadSettings, layout: PartitionLayout, wanted: int, *, itemsize: int) -> None:
    setting, least = f"TransferConfig(gradient_bytes={wanted})", layout.least_gradient_budget(itemsize)
    reason = _needs_all_gradients(settings, layout, itemsize=itemsize)
    if reason is not None:
        raise ConfigError(f"{setting} cannot be kept: {reason}.", "Leave it out.")
    if wanted < least:
        raise ConfigError(
            f"{setting} is too little for this model: the gradient of its largest parameter needs {least} bytes.",
            f"Pass at least {least}.",
        )


def gradient_store(settings: OffloadSettings, *, direct: bool) -> TensorStore:
    """Return a store for gradients, in the storage folders of a rank's open state.

    Args:
        settings: Folders and transfer settings.
        direct: Whether the state has direct I/O; if not, a warning was given already.

    Raises:
        StorageError: A file cannot be created.
    """
    transfer = settings.transfer
    return TensorStore(
        settings.storage,
        job=transfer.job,
        direct_io="auto" if direct else "off",
        io_engine=transfer.io_engine,
        io_timeout=transfer.io_timeout,
        what="Gradients",
    )


def _unnamed_space(settings: OffloadSettings, extents: ExtentMap) -> list[SpaceRequest]:
    """Return the space for data other than the state: gradients, and activations if their size is known."""
    folders, activations = settings.storage, settings.activations
    requests = _gradient_space(settings, extents)
    if activations is None or activations.storage_bytes is None:
        return requests
    assert isinstance(activations.storage_bytes, int), "a size given as text is kept as bytes"
    return [*requests, *measure_activation_space(folders, nbytes=activations.storage_bytes)]


def _gradient_space(settings: OffloadSettings, extents: ExtentMap) -> list[SpaceRequest]:
    """Return the space for gradients on storage: spilled ones if there is a budget, or the files of cards."""
    if settings.gradient_budget is not None:
        sizes = [extent.numel * settings.gradient_itemsize for extent in extents.extents]
        return measure_tensor_space(settings.storage, sizes=sizes, what=SPILLED_GRADIENTS)
    nbytes = card_file_bytes(settings, extents)
    return measure_gradient_space(settings.storage, nbytes=nbytes) if nbytes else []


def require_parameter_space(
    parameters: ParameterSettings,
    offload: OffloadSettings,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    in_16_bit: bool,
) -> None:
    """Check on every rank that storage has room for the parameters about to move there, and for optimizer state.

    Args:
        parameters: Storage settings of parameters.
        offload: Storage settings of optimizer state.
        model: The model. Parameters that ZeRO-3 has already partitioned are not moved.
        optimizer: The user's torch optimizer.
        in_16_bit: Whether parameters will be bf16 or fp16.

    Raises:
        StorageFullError: Storage has too little space; raised on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = [param for param in model.parameters() if not hasattr(param, "ds_id")]
    sizes = [-(-p.numel() // world_size) * (2 if in_16_bit else p.element_size()) for p in whole]
    if not sizes:
        return
    trained = [param for param in model.parameters() if param.requires_grad]
    numels = [-(-int(getattr(p, "ds_numel", p.numel())) // world_size) for p in trained]
    transfer = offload.transfer
    layout = build_layout(
        [ParameterSlice(name="", numel=n, real_numel=n, group=0, sub_group=0) for n in numels],
        tasklet_bytes=offload.tasklet_bytes,
        num_arrays=len(rule_for(optimizer).arrays),
        num_devices=len(offload.storage),
        places_per_tasklet=transfer.places_per_tasklet,
        state_format=offload.state_format,
    )
    # Gradients beyond their budget need space, too. Their dtype is not known yet; this is their smallest possible size.
    itemsize = 2 if in_16_bit else 4
    offload = with_gradient_budget(replace(offload, gradient_itemsize=itemsize), layout, itemsize=itemsize, group=None)
    extents = with_cache(layout, offload, None, itemsize=offload.gradient_itemsize).extents
    moves = None if offload.resumes else plan_moves(offload, None)
    requests: list[SpaceRequest] = []
    with raising_together(), io_limit(transfer.io_timeout):
        requests = [
            *_state_space(offload, extents, moves, rank=rank, numel=layout.numel, num_parameters=len(numels)),
            *measure_tensor_space(parameters.folders, sizes=sizes, what=PARAMETERS),
        ]
    require_space(_of_all_ranks(requests, None))


def _create_store(
    settings: OffloadSettings,
    layout: PartitionLayout,
    description: StoreDescription,
    group: ProcessGroup | None,
    job_id: bytes,
) -> StateStore:
    num_machines = len(set(gather(machine_identity(), group)))
    return create_store(
        settings.storage,
        config=settings.transfer,
        extents=layout.extents,
        description=description,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        num_machines=num_machines,
        job_id=job_id,
    )


def _space_of_all_ranks(
    settings: OffloadSettings, layout: PartitionLayout, moves: Plan, group: ProcessGroup | None
) -> list[SpaceRequest]:
    requests: list[SpaceRequest] = []
    rank, num_parameters = dist.get_rank(group), len(layout.parameters)
    with raising_together(group), io_limit(settings.transfer.io_timeout):
        requests = _state_space(
            settings, layout.extents, moves, rank=rank, numel=layout.numel, num_parameters=num_parameters
        )
    return _of_all_ranks(requests, group)


def _of_all_ranks(requests: Sequence[SpaceRequest], group: ProcessGroup | None) -> list[SpaceRequest]:
    """Return the requests of all ranks, with file system numbers that are the same on all machines. Collective."""
    places = places_of([Path(request.path) for request in requests], group, by_device=True)
    named = [replace(each, machine="", file_system=place.number) for each, place in zip(requests, places, strict=True)]
    return [request for of_rank in gather(named, group) for request in of_rank]


def _state_space(
    settings: OffloadSettings, extents: ExtentMap, moves: Plan | None, *, rank: int, numel: int, num_parameters: int
) -> list[SpaceRequest]:
    """Return this rank's space requests for its state and other data, after earlier state was archived.

    Args:
        settings: Folders of the state.
        extents: The extents of its tasklets.
        moves: Plan of the moves; None: the training resumes from state that is already there.
        rank: Rank of this process.
        numel: Number of elements of its partition.
        num_parameters: Number of parameters in it.
    """
    if moves is None:
        return _unnamed_space(settings, extents)
    return [
        *measure_space(
            settings.storage,
            job=settings.transfer.job,
            rank=rank,
            extents=extents,
            num_parameters=num_parameters,
            moved=[part.path for _, part in moves.moved],
        ),
        *space_of(moves, rank),
        *_unnamed_space(settings, extents),
        *measure_residual_space(settings.storage[0], numel=settings.recorded_numel(numel)),
    ]

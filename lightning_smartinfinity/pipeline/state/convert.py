"""Converts kept stores to another state format, outside of training."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lightning_smartinfinity.common.progress import Advance, Show, hidden
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import ConfigError, StorageCorruptError, StorageError, UnsupportedError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where, optimizers_of, serves
from lightning_smartinfinity.pipeline.layout.partition_layout import (
    PartitionLayout,
    build_layout,
    described_slices,
    layout_over,
)
from lightning_smartinfinity.pipeline.state.state_access import StateAccess
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, TransferConfig
from lightning_smartinfinity.settings.rules import check, one_of, require_distinct
from lightning_smartinfinity.storage import StateStore, create_store, recover_store
from lightning_smartinfinity.storage.folders.manifest import Manifest
from lightning_smartinfinity.storage.io.os_errors import storage_errors
from lightning_smartinfinity.storage.jobs.trainings import Condition, Training, trainings_in
from lightning_smartinfinity.storage.state.parts import find_parts

__all__ = ["convert_store"]

_NUM_BUFFERS = 4


def convert_store(
    folders: Sequence[Path],
    into: Sequence[Path],
    *,
    state_format: str,
    job: str = "default",
    rank: int | None = None,
    tasklet_bytes: int | str = HOST_TASKLET_BYTES,
    show: Show = hidden,
) -> tuple[int, ...]:
    """Write a copy of kept optimizer state in another format to other folders; the old state stays.

    If the conversion fails, the new state is removed. If the process is killed, the next conversion replaces the
    partial state.

    Args:
        folders: Folders of the old state, in the order of its manifest.
        into: Other storage folders, over which the new state is spread.
        state_format: A name in ``STATE_FORMATS``. Moments are rounded to nearest.
        job: ``TransferConfig.job`` of both states.
        rank: Rank whose state is converted; None means every rank with state in the first folder.
        tasklet_bytes: ``TransferConfig.tasklet_bytes`` of the new state.
        show: Shows the progress of each rank's conversion, in bytes of fp32 state.

    Returns:
        The ranks whose state was converted.

    Raises:
        ConfigError: A setting is out of range, or the format does not support the parameters' dtype.
        UnsupportedError: The format does not support the optimizer.
        StorageLockedError: A process uses the old state or the new folders.
        StorageError: The old state cannot be read, or the new state cannot be written: a training that can be resumed
            may be in its place.
    """
    config = TransferConfig(tasklet_bytes=tasklet_bytes, job=job)
    _check_folders(folders, into)
    ranks = _ranks_in(folders[0], job) if rank is None else (rank,)
    _refuse_trainings(into, job)
    with ExitStack() as undo:
        made = [_convert(folders, into, state_format, config, rank, undo, show) for rank in ranks]
        for store, is_kept in made:
            if is_kept:
                store.keep()
        undo.pop_all()
    for store, _ in made:
        store.close(remove=False)
    return ranks


def _check_folders(folders: Sequence[Path], into: Sequence[Path]) -> None:
    call = f"convert_store({[str(folder) for folder in folders]!r}, into={[str(folder) for folder in into]!r})"
    if not folders or not into:
        raise ConfigError(f"{call} names no folder of the old state, or none of the new.", "Name one of each.")
    require_distinct(call, [*folders, *into])


def _ranks_in(folder: Path, job: str) -> tuple[int, ...]:
    with storage_errors("Looking for optimizer state in", folder / job):
        names = os.listdir(folder / job)
    ranks = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"rank-(\d{5,})", name)))
    if not ranks:
        raise StorageError(f"There is no optimizer state in {str(folder / job)!r}.", "Check the folder and the job.")
    return tuple(ranks)


def _convert(
    folders: Sequence[Path],
    into: Sequence[Path],
    state_format: str,
    config: TransferConfig,
    rank: int,
    undo: ExitStack,
    show: Show,
) -> tuple[StateStore, bool]:
    """Return one rank's new store, which ``undo`` removes, and whether the old store is marked ``keep``."""
    with ExitStack() as opened:
        source = recover_store(folders, job=config.job, rank=rank)
        opened.callback(source.close, remove=False)
        manifest = source.manifest
        _check_format(state_format, manifest)
        wanted = config.buffer_bytes or HOST_TASKLET_BYTES
        layout = _layout(manifest, tasklet_bytes=wanted, num_devices=len(into), state_format=state_format)
        target = create_store(
            into,
            config=replace(config, durability=manifest.durability),
            extents=layout.extents,
            description=replace(manifest.description, tasklet_bytes=wanted),
            rank=rank,
            world_size=manifest.world_size,
            job_id=manifest.job,
        )
        undo.callback(target.close, remove=True)
        nbytes = 4 * manifest.extents.num_arrays * layout.numel
        with show(f"Converting the state of rank {rank}", nbytes) as advance:
            _copy(source, target, layout, advance)
        return target, manifest.keep


def _refuse_trainings(into: Sequence[Path], job: str) -> None:
    storage = [Path(os.path.abspath(folder)) for folder in into]
    for training in trainings_in(find_parts(storage, [job]), job):
        part = next((part for part in training.parts if part.storage in storage), None)
        if part is not None and training.condition is not Condition.NO_STEP:
            folders = " ".join(sorted({str(part.storage) for part in training.parts}))
            raise StorageError(
                f"{str(part.path)!r} holds a training that {_progress_of(training)}. It is not replaced.",
                f"Name another folder, or remove it with: smart-infinity jobs {folders} --remove {job}.",
            )


def _progress_of(training: Training) -> str:
    if training.step:
        return f"was interrupted after step {training.step}"
    return "may have completed steps: its files are damaged, or parts of it are missing"


def _check_format(state_format: str, manifest: Manifest) -> None:
    check("convert_store", "state_format", state_format, one_of(*STATE_FORMATS))
    form = STATE_FORMATS[state_format]
    if not serves(form, manifest.description.optimizer):
        raise UnsupportedError(
            f"convert_store(state_format={state_format!r}) is not supported with {manifest.description.optimizer}: it "
            f"is for {optimizers_of(form)} alone.",
            f"Use state_format={names_where(lambda other: not other.arrays)}.",
        )
    dtypes = {str(parameter.get("dtype")) for parameter in manifest.description.parameters}
    if form.required_parameters is not None and dtypes - {form.parameter_dtype.name.lower()}:
        raise ConfigError(
            f"convert_store(state_format={state_format!r}) needs parameters in {form.required_parameters}; these are in"
            f" {', '.join(dtypes)}.",
            f"Use state_format={names_where(lambda other: other.required_parameters is None)}.",
        )


def _layout(manifest: Manifest, *, tasklet_bytes: int, num_devices: int, state_format: str) -> PartitionLayout:
    """Return the partition that the manifest describes, cut into tasklets of another size.

    Raises:
        StorageCorruptError: The manifest describes no partition, or another one than the partition on storage.
    """
    try:
        present = layout_over(described_slices(manifest.description.parameters), manifest.extents)
        return build_layout(
            present.parameters,
            tasklet_bytes=tasklet_bytes,
            num_arrays=manifest.extents.num_arrays,
            num_devices=num_devices,
            places_per_tasklet=manifest.extents.places_per_tasklet,
            state_format=state_format,
        )
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise StorageCorruptError(
            f"The manifest in {manifest.folders[0]!r} does not describe the parameters whose state is there.",
            "Resume from a checkpoint in the format that you want.",
        ) from error


def _copy(source: StateStore, target: StateStore, layout: PartitionLayout, advance: Advance) -> None:
    names = source.manifest.description.arrays
    before = PartitionLayout(parameters=layout.parameters, sub_groups=layout.sub_groups, extents=source.extents)
    with ExitStack() as opened:
        reading = StateAccess(before, source, _device(source, opened), names=names)
        writing = StateAccess(layout, target, _device(target, opened), names=names)

        def fill(window: Window) -> None:
            arrays = reading.read_range(window.begin, window.end, names=names)
            for name, array in zip(names, window.arrays, strict=True):
                array[:] = arrays[name]
            advance(sum(array.nbytes for array in window.arrays))

        writing.replace(fill, steps=source.steps)


def _device(store: StateStore, opened: ExitStack) -> HostDevice:
    device = HostDevice(num_buffers=_NUM_BUFFERS)
    opened.callback(device.close)
    largest = max((extent.nbytes for extent in store.extents.extents), default=0)
    device.open(files=store.files, identity=store.identity, buffer_bytes=largest)
    return device

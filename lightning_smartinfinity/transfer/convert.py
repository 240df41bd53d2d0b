"""A kept store into another state format, without training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from lightning_smartinfinity.config import TransferConfig
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.store.extents import STATE_FORMATS
from lightning_smartinfinity.store.manifest import Manifest
from lightning_smartinfinity.transfer.layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.transfer.state_access import StateAccess
from lightning_smartinfinity.transfer.windows import Window

__all__ = ["convert_store"]

_NUM_BUFFERS = 4


def convert_store(
    folders: Sequence[Path],
    into: Sequence[Path],
    *,
    state_format: str,
    job: str = "default",
    rank: int = 0,
    tasklet_bytes: int = TransferConfig.tasklet_bytes,
) -> None:
    """Write one rank's kept optimizer state anew, in another format and other folders; the old one stays.

    Args:
        folders: Where it lies, in the order of its manifest.
        into: Other storage folders, as many as the new one is to be spread over.
        state_format: ``"fp32"``, ``"bf16"``, ``"int8"`` or ``"int8_remainder"``. Moments are rounded to nearest.
        job: ``TransferConfig.job``, of both.
        rank: Whose.
        tasklet_bytes: ``TransferConfig.tasklet_bytes`` of the new one.

    Raises:
        ConfigError: There is no such format, or it does not go with the parameters' dtype.
        StorageError: The old state cannot be read or the new one not be written, of which nothing is left then.
    """
    with ExitStack() as opened:
        source = StateStore.recover(folders, job=job, rank=rank)
        opened.callback(source.close, remove=False)
        manifest = source.manifest
        _check_format(state_format, manifest)
        layout = build_layout(
            _slices(manifest),
            tasklet_bytes=tasklet_bytes,
            num_arrays=manifest.extents.num_arrays,
            num_devices=len(into),
            num_slots=manifest.extents.num_slots,
            state_format=state_format,
        )
        config = TransferConfig(
            tasklet_bytes=tasklet_bytes, durability=manifest.durability, job=job, keep=manifest.keep
        )
        target = StateStore.create(
            into,
            config=config,
            extents=layout.extents,
            description=manifest.description,
            rank=rank,
            world_size=manifest.world_size,
            job_id=manifest.job,
        )
        with ExitStack() as undo:
            undo.callback(target.close, remove=True)
            _copy(source, target, layout)
            undo.pop_all()
        target.close(remove=False)


def _check_format(state_format: str, manifest: Manifest) -> None:
    if state_format not in STATE_FORMATS:
        raise ConfigError(
            f"convert_store(state_format={state_format!r}) is unknown.", f"Use one of: {', '.join(STATE_FORMATS)}."
        )
    dtypes = {str(parameter["dtype"]) for parameter in manifest.description.parameters}
    if state_format == "int8_remainder" and dtypes - {"bfloat16"}:
        raise ConfigError(
            f"convert_store(state_format='int8_remainder') needs parameters in bf16; these are in {', '.join(dtypes)}.",
            "Use state_format='int8'.",
        )


def _slices(manifest: Manifest) -> list[ParameterSlice]:
    def slice_of(parameter: Any) -> ParameterSlice:
        names = ("name", "numel", "real_numel", "group", "sub_group")
        return ParameterSlice(**{name: parameter[name] for name in names})

    return [slice_of(parameter) for parameter in manifest.description.parameters]


def _copy(source: StateStore, target: StateStore, layout: PartitionLayout) -> None:
    names = source.manifest.description.arrays
    before = PartitionLayout(parameters=layout.parameters, sub_groups=layout.sub_groups, extents=source.extents)
    with ExitStack() as opened:
        reading = StateAccess(before, source, _device(source, opened), names=names)
        writing = StateAccess(layout, target, _device(target, opened), names=names)

        def fill(window: Window) -> None:
            arrays = reading.read_range(window.begin, window.end, names)
            for name, array in zip(names, window.arrays, strict=True):
                array[:] = arrays[name]

        writing.replace(fill, steps=source.steps, together=nullcontext)


def _device(store: StateStore, opened: ExitStack) -> HostDevice:
    device = HostDevice(num_buffers=_NUM_BUFFERS)
    opened.callback(device.close)
    largest = max((extent.nbytes for extent in store.extents.extents), default=0)
    device.open(files=store.files, identity=store.identity, buffer_bytes=largest)
    return device

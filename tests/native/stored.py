"""A partition's state on storage with two places per tasklet, laid out as in training, and a tasklet to compress."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_smartinfinity.native import (
    Batch,
    Blocks,
    DType,
    Failure,
    GradientCodec,
    Identity,
    IoScheduler,
    Operation,
    Pipeline,
    Segment,
    StateFile,
    Tasklet,
    UpdateStep,
)
from tests.helpers.compressed import Source
from tests.helpers.golden import Bits, Floats, decode
from tests.helpers.native_testing import decode_gradient, encode_gradient

__all__ = [
    "JOB",
    "Array",
    "Compressing",
    "Parts",
    "Run",
    "StoredState",
    "address_of",
    "align",
    "decoded",
    "extent_bytes",
    "flip_bit",
    "mask_of",
    "region_bytes",
    "takes_direct",
]

Array = npt.NDArray[Any]

JOB = bytes(range(16))
_BLOCK = 4096
_ITEM_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}


def align(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def extent_bytes(numel: int, num_arrays: int = 3) -> int:
    """Return the bytes of an fp32 extent."""
    return num_arrays * align(4 * numel) + _BLOCK


def region_bytes(state_format: int, numel: int, num_blocks: int, num_arrays: int = 3) -> list[int]:
    """Return the used bytes of each region, without its padding."""
    exponents = 2 * num_blocks
    return {
        0: num_arrays * [4 * numel],
        1: [4 * numel, 2 * numel, 2 * numel],
        2: [4 * numel, numel, numel, exponents],
        3: [2 * numel, 2 * numel, numel, numel, exponents],
    }[state_format]


def address_of(array: Array | None) -> int:
    return 0 if array is None else array.ctypes.data


def flip_bit(path: Path, offset: int) -> None:
    """Flip a bit of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def takes_direct(folder: Path) -> bool:
    """Return whether the folder's file system has direct I/O."""
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Run:
    """A run of elements of the partition with its step and memory. Element 0 of each array belongs to ``offset``."""

    offset: int
    numel: int
    step: int = -1
    gradient: Array | None = None
    gradient_dtype: DType = DType.FLOAT32
    parameter: Array | None = None
    parameter_dtype: DType = DType.FLOAT32
    arrays: Sequence[Array | None] = ()

    def segment(self, first: int, last: int, *, tasklet_offset: int) -> Segment:
        """Return the part in partition elements [first, last)."""
        skipped = first - self.offset
        return Segment(
            offset=first - tasklet_offset,
            numel=last - first,
            step=self.step,
            gradient=_advanced(self.gradient, skipped, self.gradient_dtype),
            gradient_dtype=self.gradient_dtype,
            parameter=_advanced(self.parameter, skipped, self.parameter_dtype),
            parameter_dtype=self.parameter_dtype,
            arrays=tuple(_advanced(array, skipped, DType.FLOAT32) for array in self.arrays),
        )


def _advanced(array: Array | None, skipped: int, dtype: DType) -> int:
    return 0 if array is None else array.ctypes.data + skipped * _ITEM_BYTES[dtype]


@dataclass
class StoredState:
    """Files, layout and pipeline of one partition.

    Args:
        direct: Whether to use direct I/O. None uses it if the folder has it.
        options: Options of the Pipeline.
        borders: Offsets at which a parameter ends and the next one begins.
        offset: Offset of the first tasklet in the partition, as the native core is told.
        wanders: Whether the two places of a tasklet lie in different files.
        payloads: Compressed gradients of tasklets, by index, for updates whose runs have no gradients. With a codec,
            memory for the compressed gradients of the runs.
        codec: Codec of the updates.
        residual: Residual of the whole partition, or None.
        residual_scale: Scale of the runs' gradients.
        padding: Offsets in the partition and lengths of elements that are not sent, each within a tasklet.
        scheduler: Where reads and writes take turns; None: they do not.
    """

    folder: Path
    numel: int
    tasklet_numel: int = 0
    num_arrays: int = 3
    num_files: int = 1
    direct: bool | None = None
    identity: Identity = field(default_factory=lambda: Identity(job=JOB, rank=3, state_format=0))
    options: dict[str, Any] = field(default_factory=dict)
    generation: int = 0
    place: int = 0
    borders: Sequence[int] = ()
    offset: int = 0
    wanders: bool = False
    payloads: dict[int, Array] = field(default_factory=dict)
    codec: GradientCodec | None = None
    residual: Array | None = None
    residual_scale: float = 1.0
    padding: Sequence[tuple[int, int]] = ()
    scheduler: IoScheduler | None = None

    def __post_init__(self) -> None:
        self.tasklet_numel = self.tasklet_numel or self.numel
        if self.direct is None:
            self.direct = takes_direct(self.folder)
        self.paths = [self.folder / f"state-{number}.bin" for number in range(self.num_files)]
        for path in self.paths:
            path.touch()
            os.truncate(path, 2 * self.num_tasklets * self.extent_bytes)
        self.pipeline = self.open_pipeline()

    def __enter__(self) -> StoredState:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.pipeline.close()

    @property
    def num_tasklets(self) -> int:
        return -(-self.numel // self.tasklet_numel)

    @property
    def extent_bytes(self) -> int:
        """Return the bytes of the largest extent."""
        return max(self.extent_bytes_of(index) for index in range(self.num_tasklets))

    def numel_of(self, index: int) -> int:
        return min(self.tasklet_numel, self.numel - index * self.tasklet_numel)

    def borders_of(self, index: int) -> list[int]:
        first = index * self.tasklet_numel
        return [border - first for border in self.borders if first < border < first + self.numel_of(index)]

    def region_bytes_of(self, index: int) -> list[int]:
        num_blocks = Blocks(self.borders_of(index)).count(self.numel_of(index))
        return region_bytes(self.identity.state_format, self.numel_of(index), num_blocks, self.num_arrays)

    def extent_bytes_of(self, index: int) -> int:
        return sum(align(used) for used in self.region_bytes_of(index)) + _BLOCK

    def regions(self, index: int = 0) -> list[Array]:
        """Return the bytes of each region as they are on storage."""
        path, offset = self.paths[self.file_of(index, self.place)], self.extent_offset(index, self.place)
        content = np.fromfile(path, np.uint8, self.extent_bytes_of(index), offset=offset)
        begin, found = 0, []
        for used in self.region_bytes_of(index):
            found.append(content[begin : begin + used])
            begin += align(used)
        return found

    def open_pipeline(self) -> Pipeline:
        self.files = [StateFile(str(p), direct=bool(self.direct), scheduler=self.scheduler) for p in self.paths]
        options = {"num_buffers": 2, "buffer_bytes": self.extent_bytes, **self.options}
        return Pipeline(files=self.files, identity=self.identity, **options)

    def file_of(self, index: int, place: int) -> int:
        return (index + place * self.wanders) % self.num_files

    def extent_offset(self, index: int, place: int) -> int:
        return (2 * index + place) * self.extent_bytes

    def tasklets(
        self, runs: Sequence[Run], *, master_in_parameter: bool = False, compressed: bool = False
    ) -> list[Tasklet]:
        """Return every tasklet with its share of the runs, reading the current place and writing the other."""
        return [self.tasklet(index, runs, master_in_parameter, compressed) for index in range(self.num_tasklets)]

    def tasklet(
        self, index: int, runs: Sequence[Run], master_in_parameter: bool = False, compressed: bool = False
    ) -> Tasklet:
        payload = self.payloads.get(index) if compressed else None
        offset = index * self.tasklet_numel
        numel = self.numel_of(index)
        segments = []
        for run in runs:
            first, last = max(offset, run.offset), min(offset + numel, run.offset + run.numel)
            if first < last:
                segments.append(run.segment(first, last, tasklet_offset=offset))
        return Tasklet(
            index=index,
            read_file=self.file_of(index, self.place),
            write_file=self.file_of(index, 1 - self.place),
            numel=numel,
            num_arrays=self.num_arrays,
            extent_bytes=self.extent_bytes_of(index),
            read_offset=self.extent_offset(index, self.place),
            read_generation=self.generation,
            write_offset=self.extent_offset(index, 1 - self.place),
            write_generation=self.generation + 1,
            segments=segments,
            master_in_parameter=master_in_parameter,
            offset=self.offset + offset,
            blocks=Blocks(self.borders_of(index)) if self.borders else None,
            payload=address_of(payload),
            payload_bytes=0 if payload is None else payload.nbytes,
            residual=_advanced(self.residual, offset, DType.FLOAT32) if compressed else 0,
            padding=[(at - offset, count) for at, count in self.padding if compressed and 0 <= at - offset < numel],
        )

    def update_batch(
        self, runs: Sequence[Run], steps: Sequence[UpdateStep], *, master_in_parameter: bool = False
    ) -> Batch:
        """Return a batch that updates every tasklet."""
        tasklets = self.tasklets(runs, master_in_parameter=master_in_parameter, compressed=True)
        return Batch(Operation.UPDATE, tasklets, list(steps), codec=self.codec, residual_scale=self.residual_scale)

    def start(
        self,
        operation: Operation,
        runs: Sequence[Run],
        steps: Sequence[UpdateStep] = (),
        *,
        master_in_parameter: bool = False,
    ) -> None:
        if operation is Operation.UPDATE:
            batch = self.update_batch(runs, steps, master_in_parameter=master_in_parameter)
        else:
            batch = Batch(operation, self.tasklets(runs, master_in_parameter=master_in_parameter), list(steps))
        self.pipeline.submit(batch)

    def work(
        self,
        operation: Operation,
        runs: Sequence[Run],
        steps: Sequence[UpdateStep] = (),
        *,
        master_in_parameter: bool = False,
    ) -> Failure | None:
        """Work a whole batch, and commit it if it wrote and did not fail."""
        self.start(operation, runs, steps, master_in_parameter=master_in_parameter)
        return self.finish(commits=operation is not Operation.READ)

    def finish(self, *, commits: bool = True) -> Failure | None:
        """Finish a batch, and commit its writes if it did not fail."""
        failure = self.pipeline.finish()
        if failure is None and commits:
            self.generation += 1
            self.place = 1 - self.place
        return failure

    def write(self, *arrays: Array | None) -> None:
        assert self.work(Operation.WRITE, [Run(0, self.numel, arrays=arrays)]) is None

    def read(self) -> tuple[Array, ...]:
        arrays = tuple(np.full(self.numel, -7, np.float32) for _ in range(self.num_arrays))
        failure = self.work(Operation.READ, [Run(0, self.numel, arrays=arrays)])
        assert failure is None, failure
        return arrays


# ---- a tasklet to compress; guard bytes after its payload must not change


Parts = Sequence[tuple[int, int, int]]
"""First and last elements and steps of segments."""

_GUARD = 64


@dataclass
class Compressing:
    """A gradient and the memory that it is compressed to.

    Args:
        gradient: The gradient as stored.
        dtype: Its type.
        residual: The fp32 residual, or None.
        scale: Scale of the gradient.
        parts: Segments. None means one segment of step 0.
        padding: Offset and length of each run of padding.
    """

    gradient: Bits
    dtype: DType = DType.FLOAT32
    residual: Any = None
    scale: float = 1.0
    parts: Parts | None = None
    padding: Sequence[tuple[int, int]] = ()
    memory: Array = field(default_factory=lambda: np.zeros(0, np.uint8))

    @property
    def numel(self) -> int:
        return self.gradient.size

    @property
    def source(self) -> Source:
        """Return the same input for the numpy reference."""
        sent = mask_of(self.numel, self.segments_of, self.padding)
        return Source(self.gradient, self.dtype, sent, self.residual, self.scale)

    @property
    def segments_of(self) -> Parts:
        return [(0, self.numel, 0)] if self.parts is None else self.parts

    def encode(self, codec: GradientCodec) -> bytes:
        """Return the payload and assert that the guard bytes are unchanged."""
        capacity = codec.payload_bytes(self.numel, self.dtype)
        self.memory = np.full(capacity + _GUARD, 0xA5, np.uint8)
        nbytes = encode_gradient(codec, self.tasklet(capacity), residual_scale=self.scale)
        assert nbytes <= capacity and (self.memory[capacity:] == 0xA5).all()
        return self.memory[:nbytes].tobytes()

    def tasklet(self, capacity: int) -> Tasklet:
        """Return the tasklet with this many bytes for its payload."""
        return Tasklet(
            index=7,
            numel=self.numel,
            num_arrays=3,
            extent_bytes=0,
            read_file=0,
            read_offset=0,
            read_generation=0,
            write_file=0,
            write_offset=0,
            write_generation=0,
            segments=[self._segment(*part) for part in self.segments_of],
            payload=self.memory.ctypes.data,
            payload_bytes=capacity,
            residual=0 if self.residual is None else self.residual.ctypes.data,
            padding=list(self.padding),
        )

    def _segment(self, first: int, last: int, step: int) -> Segment:
        address = self.gradient.ctypes.data + first * _ITEM_BYTES[self.dtype]
        return Segment(offset=first, numel=last - first, step=step, gradient=address, gradient_dtype=self.dtype)


def mask_of(numel: int, parts: Parts, padding: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return the mask of the elements that may be sent."""
    mask = np.zeros(numel, np.bool_)
    for first, last, step in parts:
        mask[first:last] = step >= 0
    for offset, count in padding:
        mask[offset : offset + count] = False
    return mask


def decoded(payload: bytes, numel: int) -> Floats:
    """Return a payload's elements as fp32."""
    memory = np.frombuffer(payload, np.uint8).copy()
    out = np.full(4 * numel + _GUARD, 0xA5, np.uint8)
    dtype = decode_gradient(memory.ctypes.data, len(payload), numel, out.ctypes.data)
    used = _ITEM_BYTES[dtype] * numel
    assert (out[used:] == 0xA5).all()
    return decode(out[:used].view(np.float32 if dtype is DType.FLOAT32 else np.int16).copy(), dtype)

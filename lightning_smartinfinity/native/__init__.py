"""The native core: I/O, update kernels, checksums and the transfer schedule, in C++.

It knows no torch: memory crosses as integer addresses, which the caller keeps alive until the batch that names them has
been drained.
"""

from __future__ import annotations

from lightning_smartinfinity.native._core import (
    AdamStep,
    Batch,
    Blocks,
    Counters,
    CudaDevice,
    CudaEvent,
    CudaStream,
    DType,
    Failure,
    FileCounters,
    FileQueue,
    HostBuffer,
    Identity,
    InstructionSet,
    Operation,
    Pipeline,
    Segment,
    StateFile,
    Tasklet,
    TransferSchedule,
    accumulate,
    crc32c,
    crc32c_widths,
    io_engines,
    select_instruction_set,
    sum_of_squares,
    supported_instruction_sets,
)

__all__ = [
    "AdamStep",
    "Batch",
    "Blocks",
    "Counters",
    "CudaDevice",
    "CudaEvent",
    "CudaStream",
    "DType",
    "Failure",
    "FileCounters",
    "FileQueue",
    "HostBuffer",
    "Identity",
    "InstructionSet",
    "Operation",
    "Pipeline",
    "Segment",
    "StateFile",
    "Tasklet",
    "TransferSchedule",
    "accumulate",
    "crc32c",
    "crc32c_widths",
    "io_engines",
    "select_instruction_set",
    "sum_of_squares",
    "supported_instruction_sets",
]

"""Gives torch without CUDA the functions of torch with CUDA, over the device of device.cpp.

Torch's own Python code of torch.cuda runs on them. So do DeepSpeed's and Lightning's accelerators for CUDA.
"""

from __future__ import annotations

import atexit
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NUM_DEVICES = 2
_CUDA = int(torch._C._autograd.DeviceType.CUDA)
_MEMORY = 4 << 30
_CYCLES_PER_MICROSECOND = 5000


class _Stream(torch.Stream):
    """Torch's Stream, as torch.cuda has it."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> _Stream:
        if known:
            return super().__new__(cls, **known)
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _ExternalStream(_Stream):
    """Stream that the core has made."""

    def __new__(cls, stream_ptr: int, device: Any = None) -> _ExternalStream:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, stream_id=stream_ptr, device_index=index, device_type=_CUDA)


class _Event(torch.Event):
    """Torch's Event, as torch.cuda has it."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> _Event:
        device = torch.device("cuda", torch.cuda.current_device())
        return super().__new__(cls, device=device, enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: torch.Event) -> float:
        return float(torch.ops.emulated_cuda.elapsed_ms(self.event_id, end_event.event_id))

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


class _Runtime:
    """The part of the runtime's functions that torch.cuda uses."""

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return _MEMORY - torch.ops.emulated_cuda.used()[0], _MEMORY


def install() -> None:
    """Let this process have CUDA devices until it ends. The library was loaded before torch was imported."""
    device = torch.ops.emulated_cuda
    seed, delay_us = os.environ["SMART_INFINITY_EMULATED_CUDA_DELAYS"].split()
    device.delay(int(seed), int(delay_us))

    def exchange(index: int) -> int:
        before = int(device.device())
        if index >= 0:
            device.set_device(index)
        return before

    def stream_of(index: int) -> tuple[int, int, int]:
        return int(device.stream(index)), index, _CUDA

    def statistics(index: int) -> dict[str, Any]:
        now, most, active, most_active, reserved = device.used()
        return {
            "allocated_bytes": {"all": {"current": now, "peak": most}},
            "active_bytes": {"all": {"current": active, "peak": most_active}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved}},
        }

    functions = {
        "getDeviceCount": lambda: NUM_DEVICES,
        "init": device.init,
        "isInBadFork": lambda: False,
        "getArchFlags": lambda: None,
        "setDevice": device.set_device,
        "getDevice": lambda: int(device.device()),
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "synchronize": lambda: device.synchronize(device.device()),
        "getCurrentStream": stream_of,
        "getCurrentRawStream": lambda index: int(device.stream(index)),
        "getDefaultStream": lambda index: (0, index, _CUDA),
        "setStream": lambda stream_id, device_index, device_type: device.set_stream(device_index, stream_id),
        "sleep": lambda cycles: device.busy(int(cycles) // _CYCLES_PER_MICROSECOND),
        "emptyCache": lambda *_: None,
        "memoryStats": statistics,
        "resetPeakMemoryStats": lambda index: device.forget_most(),
        "resetAccumulatedMemoryStats": lambda index: None,
        "clearCublasWorkspaces": lambda: None,
        "ipc_collect": lambda: None,
        "get_sync_debug_mode": lambda: 0,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._has_cuda = True  # type: ignore[misc]
    torch.version.cuda = "12.8"
    cuda: Any = torch.cuda
    cuda._cudart = _Runtime()
    cuda.Stream = cuda.streams.Stream = _Stream
    cuda.ExternalStream = cuda.streams.ExternalStream = _ExternalStream
    cuda.Event = cuda.streams.Event = _Event
    cuda.is_current_stream_capturing = lambda: False
    cuda._exchange_device, cuda._maybe_exchange_device = exchange, exchange
    cuda._is_in_bad_fork = cuda.random._is_in_bad_fork = lambda: False
    # Kernels draw from the generator of the CPU: these only hold a state.
    cuda.default_generators = tuple(torch.Generator() for _ in range(NUM_DEVICES))
    cuda._get_device_properties = lambda index: SimpleNamespace(
        name="emulated", major=8, minor=0, total_memory=_MEMORY, multi_processor_count=1, gcnArchName=""
    )
    cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda message: 0, rangePop=lambda: 0)
    cuda.is_bf16_supported = lambda including_emulation=True: True
    _collectives_by_gloo()
    atexit.register(lambda: [device.synchronize(index) for index in range(NUM_DEVICES)])


def _collectives_by_gloo() -> None:
    """Let a process group of NCCL be one of gloo, which gets the tensors as the CPU's."""
    make = dist.distributed_c10d._new_process_group_helper

    def by_gloo(group_size: int, rank: int, global_ranks: Any, backend: Any, *arguments: Any, **named: Any) -> Any:
        named.pop("backend_options", None)
        return make(group_size, rank, global_ranks, "gloo" if "nccl" in str(backend) else backend, *arguments, **named)

    dist.distributed_c10d._new_process_group_helper = by_gloo

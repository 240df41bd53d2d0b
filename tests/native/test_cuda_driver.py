"""The native core's use of the CUDA driver, on a fake one (fake_cuda.cpp): errors, streams, memory and processes."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.errors import CudaError
from lightning_smartinfinity.native import (
    Batch,
    CudaDevice,
    CudaEvent,
    CudaStream,
    DType,
    HostBuffer,
    MemoryPool,
    Operation,
)
from tests.helpers.native_testing import use_cuda_library
from tests.native.builds import assert_in_fork, is_refused, run_python
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import Run, StoredState


@pytest.mark.parametrize(
    ("library", "problem"),
    [("/nowhere/libcuda.so.1", "cannot be opened: /nowhere/libcuda.so.1"), ("libm.so.6", "has no cuInit")],
)
def test_no_driver(fake_cuda: FakeCuda, library: str, problem: str) -> None:
    """A missing driver is reported when a device is asked for, with its library, and so is a missing device.

    The driver is found if it comes later.
    """
    use_cuda_library(library)
    with pytest.raises(CudaError, match=problem) as raised:
        CudaDevice(0)
    assert "nvidia-smi" in raised.value.remedy and str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    use_cuda_library(str(fake_cuda.library))
    CudaDevice(0)
    CudaDevice(1)
    assert fake_cuda.calls().count("cuInit") == 1
    with pytest.raises(CudaError, match=r"^cuDeviceGet failed: CUDA_ERROR_FAKE \(101\): made up for a test\."):
        CudaDevice(7)


@pytest.mark.parametrize(
    "call",
    [
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuEventCreate",
        "cuEventQuery",
    ],
)
def test_every_call_is_checked(fake_cuda: FakeCuda, call: str) -> None:
    """A failing call raises with its name and the driver's text, and the next call works."""
    device = CudaDevice(0)
    stream, values = CudaStream(device), np.zeros(8, np.float32)

    def use_everything() -> None:
        event = CudaEvent(device)
        device.copy_to_device(device=values.ctypes.data, host=values.ctypes.data, nbytes=0, stream=stream.handle)
        device.copy_to_host(host=values.ctypes.data, device=values.ctypes.data, nbytes=0, stream=stream.handle)
        event.record(stream.handle)
        event.hold(0)
        event.synchronize()
        assert event.done()

    fake_cuda.fail(call)
    with pytest.raises(CudaError, match=rf"^{call} failed: .*\(2\): out of memory"):
        use_everything()
    use_everything()


def test_a_pool_registers_what_it_lends(fake_cuda: FakeCuda) -> None:
    """A pool's memory is registered while it is lent or idle within the limit, and lent as usual if it cannot be."""
    device = CudaDevice(0)
    pool = MemoryPool(device=device)
    pool.limit = 3 << 20
    leases = [pool.take(1 << 20), pool.take(1 << 20)]
    assert fake_cuda.held()["registered"] == 1 and pool.nbytes == 3 << 20
    leases.append(pool.take(2 << 20))
    assert fake_cuda.held()["registered"] == 2 and pool.nbytes == 5 << 20
    del leases[::2]
    gc.collect()
    assert fake_cuda.held()["registered"] == 1 and pool.nbytes == 3 << 20
    pool.limit = 0
    assert fake_cuda.held()["registered"] == 1 and pool.lent_bytes == 1 << 20
    fake_cuda.fail("cuMemHostRegister_v2")
    leases.append(pool.take(3 << 20))
    leases[-1].memoryview()[:] = bytes(3 << 20)
    assert fake_cuda.held()["registered"] == 1
    assert device.registration_failure.startswith("cuMemHostRegister_v2 failed: CUDA_ERROR_FAKE (2): out of memory")
    leases.clear()
    gc.collect()
    assert fake_cuda.held()["registered"] == 0 and pool.nbytes == 0


def test_a_driver_that_is_gone(fake_cuda: FakeCuda) -> None:
    """After the driver is gone, as at the end of a process, objects are freed silently and calls raise."""
    device = CudaDevice(0)
    stream, event, buffer = CudaStream(device), CudaEvent(device), HostBuffer(4096)
    buffer.register(device)
    fake_cuda.deinitialize()
    with pytest.raises(CudaError, match=r"\(4\)"):
        event.record(stream.handle)
    buffer.unregister()
    del stream, event, buffer, device
    gc.collect()


def test_a_forked_child_leaves_the_driver_alone(fake_cuda: FakeCuda) -> None:
    """In a forked child the parent's objects raise when used, and call nothing when they are freed."""
    device = CudaDevice(0)
    held: dict[str, Any] = {"stream": CudaStream(device), "event": CudaEvent(device), "buffer": HostBuffer(4096)}
    held["buffer"].register(device)
    fake_cuda.clear()

    def calls_nothing() -> bool:
        uses = (lambda: held["event"].record(0), lambda: held["stream"].follow(0), lambda: CudaEvent(device))
        refused = [is_refused(use) for use in uses]
        held["buffer"].unregister()
        held.clear()
        gc.collect()
        return refused == [True, True, True] and fake_cuda.log() == []

    assert_in_fork(calls_nothing)
    assert fake_cuda.held()["registered"] == 1


def test_the_end_of_a_process_that_holds_everything(fake_cuda: FakeCuda) -> None:
    """A process that ends with registered memory, streams and work in flight neither crashes nor prints anything."""
    code = f"""
        from lightning_smartinfinity.native import CudaDevice, CudaEvent, CudaStream, HostBuffer
        from tests.helpers.native_testing import use_cuda_library

        use_cuda_library({str(fake_cuda.library)!r})
        device = CudaDevice(0)
        stream, event, buffer = CudaStream(device), CudaEvent(device), HostBuffer(1 << 20)
        buffer.register(device)
        device.copy_to_host(host=buffer.address, device=buffer.address + 4096, nbytes=4096, stream=stream.handle)
        event.record(stream.handle)
    """
    assert run_python(code) == ""


def test_parameters_of_a_batch_with_a_stream(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    """Without parameters a batch allocates no slots and copies nothing. Parameters of two types would overlap there."""
    stream = CudaStream(CudaDevice(0))
    with StoredState(tmp_path, 1_000) as state:
        state.write(*(np.ones(1_000, np.float32) for _ in range(3)))
        ring_bytes = state.pipeline.ring_bytes
        fake_cuda.clear()
        found = np.zeros(1_000, np.float32)
        state.pipeline.submit(Batch(Operation.READ, state.tasklets([Run(0, 1_000, arrays=(None, found))]), [], stream))
        assert state.pipeline.finish() is None and found.all()
        assert (state.pipeline.ring_bytes, fake_cuda.log()) == (ring_bytes, [])
        runs = [Run(0, 500, parameter=found), Run(500, 500, parameter=found, parameter_dtype=DType.FLOAT16)]
        with pytest.raises(ValueError, match="tasklet 0: parameters on a device are of one dtype"):
            state.pipeline.submit(Batch(Operation.READ, state.tasklets(runs), [], stream))

"""The host device: a native pipeline behind the interface of all devices."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_smartinfinity import native
from lightning_smartinfinity.devices import HostDevice
from lightning_smartinfinity.devices.host import _error_of
from lightning_smartinfinity.errors import ConfigError, StorageCorruptError, StorageError, StorageFullError
from tests.helpers.native_testing import inject
from tests.helpers.waiting import PROCESS_LIMIT

NUMEL = 2_048
EXTENT_BYTES = 3 * 4 * NUMEL + 4_096


@contextmanager
def opened(*paths: Path, direct: Path | None = None, **settings: Any) -> Iterator[HostDevice]:
    """Yield a device of these files, of which one has direct I/O."""
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(2 * EXTENT_BYTES))
    device = HostDevice(**{"num_buffers": 2, **settings})
    device.open(
        files=[native.StateFile(str(path), direct=path == direct) for path in paths],
        identity=native.Identity(job=bytes(16), rank=0, state_format=0),
        buffer_bytes=EXTENT_BYTES,
    )
    yield device
    device.close()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[HostDevice]:
    with opened(tmp_path / "state.bin") as device:
        yield device


def written() -> native.Batch:
    """Return a batch that writes two tasklets."""
    return native.Batch(
        native.Operation.WRITE,
        [
            native.Tasklet(
                index=index,
                read_file=0,
                write_file=0,
                numel=NUMEL,
                num_arrays=3,
                extent_bytes=EXTENT_BYTES,
                read_offset=index * EXTENT_BYTES,
                read_generation=0,
                write_offset=index * EXTENT_BYTES,
                write_generation=0,
                segments=[],
            )
            for index in range(2)
        ],
    )


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, StorageError)],
)
def test_failed_batch(device: HostDevice, number: int, kind: type[StorageError]) -> None:
    """A failed batch raises the fitting error with path, offset and remedy, and the device takes the next batch."""
    inject(device.pipeline, fail_write_at=1, errno=number)
    device.submit(written())
    with pytest.raises(kind, match=rf"at offset {EXTENT_BYTES} of /.*state\.bin \(tasklet 1\)") as caught:
        device.finish()
    assert type(caught.value) is kind
    assert caught.value.remedy
    device.submit(written())
    device.finish()


@pytest.mark.parametrize(("name", "what"), [("state.bin", "Optimizer state"), ("(unnamed file)", "Gradients")])
@pytest.mark.parametrize("kind", ["checksum", "foreign", "generation", "format", "gradient", "short"])
def test_every_kind_of_failure_has_a_remedy(kind: str, name: str, what: str) -> None:
    """Each kind of failure becomes one of our errors with the core's message, what it is of, and a remedy."""
    failure: Any = SimpleNamespace(kind=kind, path=f"/disk/default/{name}", message="the extent is bad", errno=0)
    error = _error_of(failure)
    assert isinstance(error, StorageCorruptError) == (kind != "short")
    assert error.problem.startswith(f"{what}: the extent is bad")
    assert error.remedy


def test_memory_that_is_not_to_be_had() -> None:
    """A ring that cannot be mapped raises StorageError instead of crashing."""
    identity = native.Identity(job=bytes(16), rank=0, state_format=0)
    files = [native.StateFile("/dev/null", direct=False)]
    with pytest.raises(StorageError, match="Allocating buffers"):
        HostDevice(num_buffers=4096).open(files=files, identity=identity, buffer_bytes=1 << 40)


def test_devices_need_no_torch() -> None:
    """The store and the devices can be imported without torch."""
    code = (
        "import sys, lightning_smartinfinity.devices, lightning_smartinfinity.storage; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PROCESS_LIMIT)


def test_unavailable_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is unavailable on this system is refused, with the reason, before anything is opened."""
    monkeypatch.setattr(native, "io_engines", lambda: [("io_uring", "forbidden"), ("threads", None)])
    with pytest.raises(ConfigError, match=r"io_engine='io_uring'.*forbidden.*io_engine='auto'"):
        HostDevice(num_buffers=2, io_engine="io_uring")


def test_choice_of_engine_is_told(device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description names the I/O engine in use and the reason why a faster one is not.

    One folder without direct I/O keeps all folders from using io_uring, and the description names it.
    """
    no_direct = "plain for all folders, since these have no direct I/O"
    assert device.description == f"Optimizer state: updated on the host, I/O by {no_direct}: {tmp_path}."
    direct, buffered = tmp_path / "direct/state.bin", tmp_path / "buffered/state.bin"
    with opened(direct, buffered, direct=direct) as both:
        assert both.description.endswith(f"I/O by {no_direct}: {buffered.parent}.")
    monkeypatch.setattr(native, "io_engines", lambda: [("io_uring", "forbidden"), ("threads", None)])
    with opened(direct, io_engine="threads") as threads:
        assert threads.description.endswith("I/O by threads (forbidden).")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "with registered buffers"),
        (errno.ENOMEM, r"without registered buffers \(.*0\.05 MiB.*limit on lockable memory; raise it: ulimit -l\)"),
        (errno.EPERM, r"without registered buffers \(Operation not permitted\)"),
    ],
)
def test_registration_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    """The description says whether the ring is registered with io_uring. If not, it gives the reason and the remedy.

    By default files with direct I/O use io_uring. For the page cache it would only start kernel threads.
    """
    path = tmp_path / "state.bin"
    with opened(path, direct=path) as device:
        if number:
            refused = SimpleNamespace(registered_bytes=0, registration_errno=number)
            pipeline = SimpleNamespace(io_engine="io_uring", ring_bytes=device.ring_bytes, counters=lambda: refused)
            monkeypatch.setattr(HostDevice, "pipeline", pipeline)
            monkeypatch.setattr(HostDevice, "cache_bytes", 0)
        assert re.search(rf"I/O by io_uring, {words}\.$", device.description)

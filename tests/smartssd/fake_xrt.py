"""XRT's C API without XRT, built from fake_xrt.cpp, which the core opens in tests instead of libxrt_coreutil."""

from __future__ import annotations

import ctypes
from pathlib import Path

from tests.native.builds import built_once

__all__ = ["FakeXrt", "build", "without"]

SOURCE = Path(__file__).with_suffix(".cpp")


def build() -> Path:
    """Return the library, which is compiled if there is none yet."""
    return built_once("libfake_xrt.so", SOURCE)


def without(library: Path, entry: str, folder: Path) -> Path:
    """Return a copy of the library in which an entry point is renamed."""
    content, name = library.read_bytes(), b"\0" + entry.encode() + b"\0"
    assert name in content
    lacking = folder / library.name
    lacking.write_bytes(content.replace(name, name.replace(b"xrt", b"old")))
    return lacking


class FakeXrt:
    """The controls and observations of the fake library."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._calls = calls = ctypes.CDLL(str(library))
        calls.fake_log.restype = ctypes.c_char_p
        calls.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self.reset()

    def reset(self) -> None:
        """Remove failures and empty the log."""
        self._calls.fake_reset()

    def fail(self, call: str, *, result: int = -1, errno: int = 0) -> None:
        """Make calls fail from now on. Calls that create something return null, the others this result."""
        self._calls.fake_fail(call.encode(), result, errno)

    def log(self) -> list[str]:
        """Return the calls since :meth:`reset` with their arguments."""
        return str(self._calls.fake_log().decode()).splitlines()

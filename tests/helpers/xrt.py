"""Tells whether this machine has the XRT that emulated SmartSSDs need: libxrt1, libxrt-dev, uuid-dev of Debian 12."""

from __future__ import annotations

from functools import cache
from pathlib import Path

VERSION = "2.13"
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
_HEADER = Path("/usr/include/xrt/version.h")
_UUID_HEADER = Path("/usr/include/uuid/uuid.h")


@cache
def what_is_missing() -> str | None:
    """Return why tests are skipped, or ``None`` if nothing is missing."""
    if not list(LIBRARIES.glob(f"libxrt_noop.so.{VERSION}*")):
        return f"libxrt1 is not installed in version {VERSION}"
    if not _HEADER.exists() or f'"{VERSION}.' not in _HEADER.read_text():
        return f"libxrt-dev is not installed in version {VERSION}"
    if not _UUID_HEADER.exists():
        return "uuid-dev, which headers of libxrt-dev need, is not installed"
    return None

"""Finds XRT on this machine: its folder, its version, and the bindings that can call it."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from lightning_smartinfinity.devices.smartssd.discovery.system import System, text_of
from lightning_smartinfinity.errors import ConfigError, DeviceError

__all__ = ["Runtime", "choose_binding", "require_runtime", "runtime_of"]

_LIBRARY = "libxrt_coreutil.so.2"
_INSTALL = (
    "Install XRT and load its settings: source /opt/xilinx/xrt/setup.sh. On Debian 12, which has no such file:"
    " apt-get install libxrt1 && mkdir -p ~/xrt && ln -sfn /usr/lib/$(uname -m)-linux-gnu ~/xrt/lib &&"
    " export XILINX_XRT=~/xrt"
)
_NO_PYXRT = (
    "Use binding='auto', or the pyxrt of AMD's XRT: export PYTHONPATH=/opt/xilinx/xrt/python. Debian 12 has no pyxrt:"
    " its package python3-xrt is another program."
)


class Runtime(NamedTuple):
    """The installation of XRT.

    Args:
        root: XILINX_XRT; ``None`` if it is not set, in which case XRT finds no driver.
        version: Version of the installation; ``None`` if unknown.
        library: Name or path that loads the C library; ``None`` if it cannot be loaded.
        pyxrt: Whether the Python module is installed.
    """

    root: Path | None
    version: str | None
    library: str | None
    pyxrt: bool


def runtime_of(system: System) -> Runtime:
    """Return this machine's installation of XRT."""
    named = system.environment.get("XILINX_XRT")
    root = Path(named) if named else None
    library = _loadable(root)
    version = _version_told_by(root) or _version_loaded(system)
    return Runtime(root, version, library, importlib.util.find_spec("pyxrt") is not None)


def require_runtime(runtime: Runtime) -> Path:
    """Return XRT's folder; raise if XRT cannot find cards on this machine.

    Raises:
        DeviceError: XILINX_XRT is not set or is not a folder.
    """
    if runtime.root is None:
        raise DeviceError("The environment variable XILINX_XRT is not set: XRT finds no card without it.", _INSTALL)
    if not runtime.root.is_dir():
        raise DeviceError(f"XILINX_XRT={str(runtime.root)!r} is no folder.", _INSTALL)
    return runtime.root


def choose_binding(wanted: str, runtime: Runtime) -> str:
    """Choose the binding that calls XRT: ``"native"`` or ``"pyxrt"``.

    Args:
        wanted: ``SmartSSDConfig.binding``.
        runtime: The installation.

    Raises:
        ConfigError: The wanted binding is unavailable.
        DeviceError: Neither binding is available.
    """
    if wanted == "auto":
        if runtime.library:
            return "native"
        if runtime.pyxrt:
            return "pyxrt"
        raise DeviceError(f"Neither XRT's C library ({_LIBRARY}) nor its Python module pyxrt can be loaded.", _INSTALL)
    unavailable = f"SmartSSDConfig(binding={wanted!r}) is unavailable here"
    if wanted == "native" and not runtime.library:
        raise ConfigError(f"{unavailable}: {_LIBRARY} cannot be loaded.", "Use binding='auto'.")
    if wanted == "pyxrt" and not runtime.pyxrt:
        raise ConfigError(f"{unavailable}: there is no module pyxrt.", _NO_PYXRT)
    return wanted


def _version_told_by(root: Path | None) -> str | None:
    content = text_of(root / "version.json") if root is not None else None
    try:
        return str(json.loads(content or "")["BUILD_VERSION"])
    except (ValueError, KeyError, TypeError):
        return None


def _version_loaded(system: System) -> str | None:
    """Return the version from the file name of the loaded library, because Debian's package has no version.json."""
    found = re.search(r"/libxrt_coreutil\.so\.(\d+\.[\d.]+)$", text_of(system.maps) or "", re.MULTILINE)
    return found[1] if found else None


def _loadable(root: Path | None) -> str | None:
    for name in (_LIBRARY, *([str(root / "lib" / _LIBRARY)] if root is not None else [])):
        try:
            ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
        except OSError:
            continue
        return name
    return None

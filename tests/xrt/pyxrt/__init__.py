"""pyxrt for the tests: the system's own where it has one, else ``module.cpp``, built once.

Both must match ``signatures_2.13.json``, which was read from the genuine module of XRT 2.13.
"""

from __future__ import annotations

import importlib
import json
import re
import sysconfig
import warnings
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pybind11

from tests.helpers.xrt import VERSION
from tests.native.builds import built_once

_FOLDER = Path(__file__).parent


@cache
def load() -> ModuleType:
    """Return pyxrt; our own module is not in ``sys.modules``, so that only a test that asks for it finds it."""
    if find_spec("pyxrt") is not None:
        return importlib.import_module("pyxrt")
    spec = spec_from_file_location("pyxrt", _built())
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    """Return our module's file, which is compiled in a quarter of a minute if there is none yet."""
    headers = ("/usr/include/xrt", pybind11.get_include(), sysconfig.get_path("include"))
    include = [part for folder in headers for part in ("-isystem", folder)]
    # With another version of XRT or pybind11 it is compiled anew.
    versions = f"-DVERSIONS={VERSION}+{pybind11.__version__}"
    options = ("-std=c++17", "-O1", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", versions, *include)
    name = f"pyxrt{sysconfig.get_config_var('EXT_SUFFIX')}"
    return built_once(name, _FOLDER / "module.cpp", options=(*options, "-lxrt_coreutil", "-luuid"))


def current(pyxrt: ModuleType) -> ModuleType:
    """Return a module with the classes of a pyxrt, in which the calls deprecated in XRT's master warn.

    Registering an xclbin loads it, as XRT does where the driver knows no contexts. That is so with xocl.
    """

    class device(pyxrt.device):  # type: ignore[misc,name-defined]
        def register_xclbin(self, xclbin: Any) -> Any:
            return super().load_xclbin(xclbin)

        def load_xclbin(self, xclbin: Any) -> Any:
            _deprecated("device.load_xclbin")
            return super().load_xclbin(xclbin)

    class hw_context:
        def __init__(self, device: Any, uuid: Any) -> None:
            if device.get_xclbin_uuid().to_string() != uuid.to_string():
                raise RuntimeError("the xclbin is not registered")
            self.device, self.uuid = device, uuid

    class kernel(pyxrt.kernel):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: Any) -> None:
            if isinstance(arguments[0], hw_context):
                context, name = arguments
                super().__init__(context.device, context.uuid, name)
            else:
                _deprecated("kernel(device, uuid, name)")
                super().__init__(*arguments)

    module = ModuleType("pyxrt")
    vars(module).update(vars(pyxrt), device=device, hw_context=hw_context, kernel=kernel)
    return module


def _deprecated(call: str) -> None:
    warnings.warn(f"{call} is deprecated: use hw_context", DeprecationWarning, stacklevel=3)


# ---- what a pyxrt offers, in a form that does not depend on the pybind11 that it was built with


Signatures = dict[str, "list[str] | dict[str, int]"]
"""Overloads of functions in order, and values of enumerations, by dotted names."""

# How pybind11 2 and 3 write the same types. The order of registration decides whether a class has its name in Python.
_SPELLINGS = {
    r"typing\.SupportsInt( \| typing\.SupportsIndex)?": "int",
    r"typing_extensions\.Buffer|collections\.abc\.Buffer": "buffer",
    r"typing_extensions\.CapsuleType|types\.CapsuleType": "capsule",
    r"numpy\.typing\.NDArray\[numpy\.int8\]": "numpy.ndarray[numpy.int8]",
    r"\bList\[": "list[",
    r"\bxrt::": "pyxrt.",
    r"\bstd::vector<pyxrt\.xclbin::ip, [^>]*> ?>": "pyxrt.xclbinip_vector",
}
_SPECIAL = ("__init__", "__call__")


def expected() -> Signatures:
    """Return the signatures of XRT 2.13."""
    return {name: _plain(value) for name, value in json.loads((_FOLDER / "signatures_2.13.json").read_text()).items()}


def signatures(module: ModuleType) -> Signatures:
    """Return the signatures of a module: of every class, with the classes inside it."""
    found: Signatures = {}
    for name in ("bo", "device", "ert_cmd_state", "kernel", "run", "uuid", "xclBOSyncDirection", "xclbin"):
        _add(found, name, getattr(module, name))
    _add(found, "xrt_info_device", module.xrt_info_device)
    return found


def _add(found: Signatures, name: str, kind: Any) -> None:
    if hasattr(kind, "__members__"):
        found[name] = {member: int(value) for member, value in kind.__members__.items()}
        return
    for attribute, value in vars(kind).items():
        if isinstance(value, type):
            _add(found, f"{name}.{attribute}", value)
        elif attribute in _SPECIAL or (not attribute.startswith("_") and callable(value)):
            found[f"{name}.{attribute}"] = _plain([line for line in value.__doc__.splitlines() if "->" in line])


def _plain(value: list[str] | dict[str, int]) -> list[str] | dict[str, int]:
    return value if isinstance(value, dict) else [_one_spelling(line) for line in value]


def _one_spelling(line: str) -> str:
    """Return a signature with its types written in one way."""
    for pattern, spelling in _SPELLINGS.items():
        line = re.sub(pattern, spelling, line)
    return line

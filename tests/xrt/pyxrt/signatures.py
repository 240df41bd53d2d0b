"""Lists what a pyxrt offers, in a form that does not depend on the pybind11 that it was built with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Signatures", "expected", "one_spelling", "signatures"]

Signatures = dict[str, "list[str] | dict[str, int]"]
"""Overloads of functions in order, and values of enumerations, by dotted names."""

_FILE = Path(__file__).with_name("signatures_2.13.json")

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
    return {name: _plain(value) for name, value in json.loads(_FILE.read_text()).items()}


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
    return value if isinstance(value, dict) else [one_spelling(line) for line in value]


def one_spelling(line: str) -> str:
    """Return a signature with its types written in one way."""
    for pattern, spelling in _SPELLINGS.items():
        line = re.sub(pattern, spelling, line)
    return line

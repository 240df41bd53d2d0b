"""Builds the binding with pybind11, unless the system comes with the genuine pyxrt."""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pybind11

from tests.helpers.xrt import VERSION
from tests.native.builds import ROOT, run
from tests.xrt.builds import locked

__all__ = ["built", "load"]

_SOURCE = Path(__file__).with_name("module.cpp")
_HEADERS = Path("/usr/include/xrt")
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


@cache
def load() -> ModuleType:
    """Return pyxrt; our own module is not in ``sys.modules``, so that only a test that asks for it finds it."""
    if find_spec("pyxrt") is not None:
        return importlib.import_module("pyxrt")
    spec = spec_from_file_location("pyxrt", built())
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Return our module's file, in its own folder; compile it in a quarter of a minute if there is none yet."""
    folder = ROOT / "build/pyxrt" / _state_of_sources()
    module = folder / f"pyxrt{sysconfig.get_config_var('EXT_SUFFIX')}"
    with locked(folder):
        if not module.exists():
            _compile(module)
    return module


def _compile(module: Path) -> None:
    unfinished = module.with_suffix(".unfinished")
    headers = (_HEADERS, pybind11.get_include(), sysconfig.get_path("include"))
    include = [part for folder in headers for part in ("-isystem", folder)]
    compiler = os.environ.get("CXX", "c++")
    run(compiler, *_FLAGS, *include, _SOURCE, "-o", unfinished, "-lxrt_coreutil", "-luuid")
    unfinished.rename(module)


def _state_of_sources() -> str:
    versions = f"{VERSION} {pybind11.__version__} {_FLAGS}"
    return hashlib.sha256(_SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]

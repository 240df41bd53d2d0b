"""Builds the emulated CUDA device, once per machine and state of the sources, and makes processes that have it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from tests.helpers.fresh_python import fresh_environment
from tests.native.builds import ROOT, run
from tests.xrt.builds import locked

__all__ = ["build", "environment"]

HERE = Path(__file__).parent
SOURCES = (HERE / "device.cpp", ROOT / "tests/native/fake_cuda.cpp")
SONAME = "libcuda.so.1"  # so the core finds this library where it looks for the driver


def build() -> Path:
    """Return the library, which is compiled first unless it is there: ten seconds."""
    command = _command()
    state = hashlib.sha256(repr((command, torch.__version__)).encode())
    for source in SOURCES:
        state.update(source.read_bytes())
    folder = ROOT / "build" / "emulated_cuda"
    with locked(folder):
        library = folder / state.hexdigest()[:16] / SONAME
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            unfinished = library.with_suffix(".unfinished")
            run(*command, "-o", unfinished)
            unfinished.rename(library)
    return library


def _command() -> list[str]:
    # Optimization would take longer than it saves.
    installed = Path(torch.__file__).parent
    libraries = installed / "lib"
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-soname,{SONAME}"]
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", f"-I{installed / 'include'}"]
    return ["g++", *options, str(SOURCES[0]), *links]


def environment(library: Path, *, seed: int = 1, delay_us: int = 1500) -> dict[str, str]:
    """Return the environment of a Python process that has two emulated CUDA devices.

    Args:
        library: Result of :func:`build`.
        seed: Seed of the delays.
        delay_us: Longest delay of a copy, in microseconds, and of one kernel in some.
    """
    return {
        **fresh_environment(),
        "PYTHONPATH": str(HERE / "site"),
        "SMART_INFINITY_EMULATED_CUDA": str(library),
        "SMART_INFINITY_EMULATED_CUDA_DELAYS": f"{seed} {delay_us}",
    }

"""Builds the emulated CUDA device, and makes processes that have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT
from tests.native.builds import ROOT, built_once

HERE = Path(__file__).parent
SONAME = "libcuda.so.1"  # so the core finds this library where it looks for the driver


def build() -> Path:
    """Return the library, which is compiled first unless it is there: ten seconds."""
    installed = Path(torch.__file__).parent
    libraries = installed / "lib"
    links = (f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-soname,{SONAME}")
    # Optimization would take longer than it saves. The version is there because another torch needs another library.
    options = ("-O0", f"-I{installed / 'include'}", f"-DTORCH_VERSION={torch.__version__}", *links)
    return built_once(SONAME, HERE / "device.cpp", ROOT / "tests/native/fake_cuda.cpp", options=options)


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


def run_on_device(*arguments: object, limit: float = PROCESS_LIMIT, **delays: int) -> subprocess.CompletedProcess[str]:
    """Run Python with the emulated device and these arguments, with a limit in seconds."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment(build(), **delays),
        capture_output=True,
        text=True,
        timeout=limit,
    )

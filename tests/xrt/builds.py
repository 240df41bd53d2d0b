"""Builds the emulated SmartSSD once per machine and state of the sources: its driver, its kernels, its xclbin.

The build lies in ``build/`` and only what changed is compiled again; processes that want it at the same time wait for
each other.
"""

from __future__ import annotations

from pathlib import Path

from hls.description import EMULATED, SMARTSSD, ComputeUnit, Design, Kernel
from hls.xclbin import xclbin
from tests.helpers.xrt import LIBRARIES
from tests.native.builds import ROOT, locked, run

_PROBE = Kernel("probe", number=9, arrays=("data",), words=("scale",))
_PROBE_DESIGN = Design(SMARTSSD.platform, (ComputeUnit(_PROBE, "probe_1"), ComputeUnit(_PROBE, "probe_2")))
_DRIVER = "libsmart_infinity_card.so.2"


class EmulatorBuild:
    """The files that XRT needs to run on emulated cards.

    Attributes:
        root: The folder that ``XILINX_XRT`` names.
        driver: What XRT loads.
        kernels: The library with the compute units, for ``SMART_INFINITY_CARD_KERNELS``.
        ini: XRT's settings.
        xclbin: The kernels of ``hls/``.
        probe_xclbin: The one kernel of ``probe_kernel.cpp``.
        stress: The program of ``stress.cpp``, where it was built with sanitizers.
        environment: The variables to set before a process uses XRT for the first time.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.driver, self.kernels = folder / "xilinx_xrt", folder / _DRIVER, folder / "libkernels.so"
        self.ini, self.stress = folder / "xrt.ini", folder / "card_stress"
        self.xclbin, self.probe_xclbin = folder / "smart_infinity.xclbin", folder / "probe.xclbin"
        self.environment = {
            "XILINX_XRT": str(self.root),
            "XCL_EMULATION_MODE": "hw_emu",
            "XRT_INI_PATH": str(self.ini),
            "SMART_INFINITY_CARD_KERNELS": str(self.kernels),
        }


def build(sanitize: str = "") -> EmulatorBuild:
    """Build what is not up to date, which takes half a minute the first time.

    Args:
        sanitize: Sanitizers, such as ``"address,undefined"``: builds the driver, the probe kernel and ``stress.cpp``.
    """
    suffix = "_".join(["", *sanitize.split(",")]) if sanitize else ""
    folder = ROOT / "build" / f"emulated_card{suffix}"
    made = EmulatorBuild(folder)
    with locked(folder / "lock"):
        if not (folder / "build.ninja").exists():
            _configure(folder, sanitize)
        run("cmake", "--build", folder)
        _write_files(made)
    return made


def _configure(folder: Path, sanitize: str) -> None:
    settings = {"SMART_INFINITY_MORE_KERNELS": str(ROOT / "tests/xrt/probe_kernel.cpp")}
    if sanitize:
        settings |= {
            "CMAKE_BUILD_TYPE": "Debug",
            "CMAKE_UNITY_BUILD": "ON",  # nearly all of the time goes into headers
            "SMART_INFINITY_SANITIZE": sanitize,
            "SMART_INFINITY_BUILD_STRESS": "ON",
            "SMART_INFINITY_CARD_KERNELS": "OFF",
        }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    run("cmake", "-S", ROOT / "hls/emulator", "-B", folder, "-G", "Ninja", *options)


def _write_files(made: EmulatorBuild) -> None:
    _write(made.ini, b"[Runtime]\nhw_em_driver=smart_infinity_card\n")
    _write(made.xclbin, xclbin(EMULATED))
    _write(made.probe_xclbin, xclbin(_PROBE_DESIGN))
    libraries = made.root / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    for library in (made.driver, *LIBRARIES.glob("libxrt_*.so.2")):
        link = libraries / library.name
        if not link.is_symlink():
            link.symlink_to(library)


def _write(file: Path, content: bytes) -> None:
    """Write a file unless it has this content, because other processes may be reading it."""
    if not file.exists() or file.read_bytes() != content:
        temporary = file.with_suffix(".new")
        temporary.write_bytes(content)
        temporary.replace(file)

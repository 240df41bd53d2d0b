"""Makes the input of v++ for the card: ``smartssd.cfg`` and command lines. Never run on a real card."""

from __future__ import annotations

import shutil
from collections import Counter

from hls.description import Design, Kernel

__all__ = ["TOOLCHAIN", "compile_line", "connectivity_config", "link_line", "missing_toolchain"]

TOOLCHAIN = "Vitis 2021.2 to 2023.1"


def connectivity_config(design: Design) -> str:
    """Return the content of ``smartssd.cfg``: the compute units of each kernel. One bank needs no ``sp=`` lines."""
    counts = Counter(unit.kernel for unit in design.compute_units)
    lines = [
        f"nk={kernel.name}:{count}:{'.'.join(unit.name for unit in design.compute_units if unit.kernel == kernel)}"
        for kernel, count in counts.items()
    ]
    return "\n".join(["[connectivity]", *lines, ""])


def compile_line(design: Design, kernel: Kernel, *, target: str, folder: str, output: str) -> list[str]:
    """Return arguments of v++ that compile a kernel, whose source is in ``folder``, from the root of the repository."""
    return [
        *_common(design, target),
        "--compile",
        *("--kernel", kernel.name),
        *("-I", "hls/include"),
        *("-I", "hls/kernels"),
        *("-I", f"{folder}/sources"),
        *_leftovers(folder, kernel.name),
        *("--output", output),
        f"{folder}/sources/{kernel.name}.cpp",
    ]


def link_line(design: Design, *, target: str, folder: str, output: str) -> list[str]:
    """Return arguments of v++ that link the kernels in ``folder``, which holds ``smartssd.cfg``, to an xclbin."""
    return [
        *_common(design, target),
        "--link",
        *("--config", f"{folder}/smartssd.cfg"),
        *_leftovers(folder, "link"),
        *("--output", output),
        *(f"{folder}/{kernel.name}.xo" for kernel in design.kernels),
    ]


def missing_toolchain(design: Design) -> str:
    """Return the message for a machine without v++; empty if v++ is installed."""
    if shutil.which("v++"):
        return ""
    return (
        f"there is no v++ on PATH: building for the card takes {TOOLCHAIN} (source its settings64.sh) and the "
        f"development package of the card's shell {design.platform.shell}"
    )


def _common(design: Design, target: str) -> list[str]:
    platform = design.platform
    return [
        "v++",
        *("--target", target),
        *("--platform", platform.shell),
        *("--kernel_frequency", str(platform.clock_mhz)),
        "--save-temps",
    ]


def _leftovers(folder: str, step: str) -> list[str]:
    """Give the temporary files of each step a folder of their own: steps may run at the same time."""
    return [part for kind in ("temp", "log", "report") for part in (f"--{kind}_dir", f"{folder}/{kind}/{step}")]

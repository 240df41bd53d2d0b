"""What v++ is given to build a design for the card: ``smartssd.cfg`` and command lines. Never run on a real card."""

from __future__ import annotations

from collections import Counter

from hls.description import Design, Kernel

__all__ = ["compile_line", "connectivity_config", "link_line"]


def connectivity_config(design: Design) -> str:
    """Content of ``smartssd.cfg``: the compute units of each kernel. One bank needs no ``sp=`` lines."""
    counts = Counter(unit.kernel for unit in design.compute_units)
    lines = [
        f"nk={kernel.name}:{count}:{'.'.join(unit.name for unit in design.compute_units if unit.kernel == kernel)}"
        for kernel, count in counts.items()
    ]
    return "\n".join(["[connectivity]", *lines, ""])


def compile_line(design: Design, kernel: Kernel, *, target: str, folder: str) -> list[str]:
    """Arguments of v++ that compile a kernel to ``folder``, run from the root of the repository."""
    return [
        *_common(design, target),
        "--compile",
        *("--kernel", kernel.name),
        *("-I", "hls/include"),
        *("--temp_dir", f"{folder}/temp"),
        *("--output", _object(kernel, folder)),
        kernel.source,
    ]


def link_line(design: Design, *, target: str, folder: str, output: str) -> list[str]:
    """Arguments of v++ that link the kernels in ``folder``, with ``smartssd.cfg`` there, to an xclbin."""
    return [
        *_common(design, target),
        "--link",
        *("--config", f"{folder}/smartssd.cfg"),
        *("--temp_dir", f"{folder}/temp"),
        *("--output", output),
        *(_object(kernel, folder) for kernel in design.kernels),
    ]


def _common(design: Design, target: str) -> list[str]:
    platform = design.platform
    return [
        "v++",
        *("--target", target),
        *("--platform", platform.shell),
        *("--kernel_frequency", str(platform.clock_mhz)),
        "--save-temps",
    ]


def _object(kernel: Kernel, folder: str) -> str:
    return f"{folder}/{kernel.name}.xo"

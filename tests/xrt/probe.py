"""The kernel of ``probe_kernel.cpp``, described as the kernels for the card are."""

from __future__ import annotations

from hls.description import SMARTSSD, ComputeUnit, Design, Kernel

__all__ = ["PROBE", "PROBE_DESIGN"]

PROBE = Kernel("probe", number=9, arrays=("data",), words=("scale",))
PROBE_DESIGN = Design(SMARTSSD.platform, (ComputeUnit(PROBE, "probe_1"), ComputeUnit(PROBE, "probe_2")))

"""Describes the kernel of ``probe_kernel.cpp`` as those for the card."""

from __future__ import annotations

from hls.description import SMARTSSD, ComputeUnit, Design, Kernel

__all__ = ["PROBE_DESIGN"]

_PROBE = Kernel("probe", number=9, arrays=("data",), words=("scale",))
PROBE_DESIGN = Design(SMARTSSD.platform, (ComputeUnit(_PROBE, "probe_1"), ComputeUnit(_PROBE, "probe_2")))

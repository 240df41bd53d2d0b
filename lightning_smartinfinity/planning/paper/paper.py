"""The tables of Smart-Infinity (HPCA 2024, arXiv 2403.06664) as data.

Values of bars and lines were measured in the figures' vector graphics, to about 1 %; ratios are printed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["SCALING", "SECONDS", "SPARSE_KERNEL_SHOWN", "SPEEDUPS", "Row", "Scaling", "Speedup"]

SPARSE_KERNEL_SHOWN = 2.9e9
"""Bytes per second of decompression and update in the paper's own figure."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds per iteration at batch size 4.

    Args:
        model: Family of the model.
        billions: Parameters in 10^9.
        num_devices: Number of SmartSSDs.
        gpu: ``"A5000"`` or ``"A100"``.
        baseline: Seconds of ZeRO-Infinity on RAID0.
        phases: Forward, backward and update of the baseline; ``None`` if not shown.
        su: Seconds of SmartUpdate; ``None`` if not shown.
        optimized: Seconds of SmartUpdate with the transfer handler (SU+O).
        compressed: Seconds of SU+O with compression to 2 % of the volume (SU+O+C).
    """

    model: str
    billions: float
    num_devices: int
    gpu: str = "A5000"
    baseline: float
    phases: tuple[float, float, float] | None = None
    su: float | None
    optimized: float
    compressed: float


def _row(
    model: str, billions: float, num_devices: int, *seconds: float, phases: tuple[float, float, float] | None
) -> Row:
    baseline, su, optimized, compressed = seconds
    return Row(
        model=model,
        billions=billions,
        num_devices=num_devices,
        baseline=baseline,
        phases=phases,
        su=su,
        optimized=optimized,
        compressed=compressed,
    )


SECONDS: tuple[Row, ...] = (
    _row("GPT-2", 4.0, 6, 23.8, 19.1, 18.4, 15.6, phases=(0.67, 5.6, 17.6)),
    _row("GPT-2", 4.0, 10, 23.7, 15.6, 14.8, 12.2, phases=(0.67, 5.2, 17.8)),
    _row("GPT-2", 8.4, 6, 49.9, 40.4, 39.5, 35.2, phases=(1.1, 11.2, 37.6)),
    _row("GPT-2", 8.4, 10, 48.8, 32.4, 31.6, 26.3, phases=(1.1, 10.9, 36.8)),
    _row("BERT", 4.0, 10, 23.5, 14.9, 14.3, 12.0, phases=None),
    _row("BERT", 8.3, 10, 48.2, 32.8, 30.2, 25.1, phases=None),
    Row(
        model="GPT-2", billions=4.0, num_devices=10, gpu="A100", baseline=22.5, su=None, optimized=12.5, compressed=10.6
    ),
)
"""Seconds from the paper's figures of the time per iteration and of the A100."""


@dataclass(frozen=True)
class Speedup:
    """Speedup over ZeRO-Infinity of GPT-2 on an A5000.

    Args:
        billions: Parameters in 10^9.
        optimized: Speedup of SU+O.
        compressed: Speedup of SU+O+C.
        num_devices: Number of SmartSSDs.
    """

    billions: float
    optimized: float
    compressed: float
    num_devices: int = 10


SPEEDUPS: tuple[Speedup, ...] = (Speedup(16.6, 1.58, 1.86), Speedup(24.2, 1.59, 1.86), Speedup(33.0, 1.58, 1.88))
"""Speedups from the paper's figure of larger models."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Speed of GPT-2 4.0B by the number of devices, relative to ZeRO-Infinity on one device.

    Args:
        num_devices: Number of devices of each column.
        billions: Parameters in 10^9.
        baseline: Speed of ZeRO-Infinity on RAID0.
        optimized: Speed of SU+O.
        compressed: Speed of SU+O+C.
        seconds: Seconds of the baseline in the last column, from which all seconds are computed.
    """

    num_devices: tuple[int, ...] = (1, 2, 4, 6, 8, 10)
    billions: float = 4.0
    baseline: tuple[float, ...]
    optimized: tuple[float, ...]
    compressed: tuple[float, ...]
    seconds: float

    def in_seconds(self, speeds: tuple[float, ...]) -> tuple[float, ...]:
        """Convert one of the series above to seconds."""
        return tuple(self.seconds * self.baseline[-1] / speed for speed in speeds)


SCALING: Mapping[str, Scaling] = MappingProxyType(
    {
        "A5000": Scaling(
            baseline=(1, 1.55, 2.22, 2.25, 2.26, 2.27),
            optimized=(0.80, 1.48, 2.55, 2.92, 3.25, 3.63),
            compressed=(0.89, 1.62, 2.80, 3.45, 3.75, 4.42),
            seconds=23.7,
        ),
        "A100": Scaling(
            baseline=(1, 1.53, 2.27, 2.44, 2.42, 2.48),
            optimized=(0.80, 1.45, 2.58, 3.18, 3.81, 4.47),
            compressed=(0.75, 1.38, 2.65, 3.34, 4.39, 5.24),
            seconds=22.5,
        ),
    }
)
"""Speeds from the paper's figures of scaling, by GPU."""

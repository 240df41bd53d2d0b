"""The only way for a test to be skipped: marks that name what the machine lacks.

On the machine that runs ``.ci/run`` a test may be skipped for one of :data:`ALLOWED_REASONS` only; any other skip fails
the session (see ``tests/conftest.py``).
"""

from __future__ import annotations

import pytest

NO_CUDA = "no CUDA device"
ALLOWED_REASONS = (NO_CUDA,)


def RunIf(*, cuda_devices: int = 0) -> pytest.MarkDecorator:
    """Skips a test where the machine lacks what it needs.

    Args:
        cuda_devices: Number of CUDA devices that the test uses.
    """
    import torch

    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < cuda_devices, reason=f"{NO_CUDA} ({cuda_devices} needed, {present} present)")


def is_allowed(reason: str) -> bool:
    """Whether a skip for this reason may pass unnoticed in CI."""
    return reason.removeprefix("Skipped: ").startswith(ALLOWED_REASONS)

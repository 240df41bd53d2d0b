"""Host and emulated cards over many steps, bit for bit: ``python -m tests.xrt.long_run --steps 50 --numel 1000000``.

Every optimizer with gradients of every dtype. Half of the elements have gradients down to subnormals, and so have their
squares; a few meet infinities and NaNs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from tests.helpers.card_runs import OPTIMIZERS, cards, same_as_host, settled_host
from tests.pipeline import harness
from tests.pipeline.harness import Case, running
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-39)


def compare(folder: Path, xclbin: Path, optimizer: str, dtype: torch.dtype, *, steps: int, numel: int) -> None:
    """Train on two cards and on the host, and assert that no byte differs.

    Args:
        folder: Folder for state.
        xclbin: The cards' xclbin.
        optimizer: A name in ``OPTIMIZERS``.
        dtype: Type of gradients and parameters.
        steps: Number of steps.
        numel: Number of elements.
    """
    shapes = ((numel - 7, 0, 0, 0), (7, 0, 1, 0))
    case = Case(
        dtype=dtype, gradient_dtype=dtype, num_devices=2, tasklet_bytes=1 << 20, shapes=shapes, **OPTIMIZERS[optimizer]
    )
    with (
        mock.patch.object(harness, "gradient_of", _gradient),
        running(folder / "cards", case, device=cards(xclbin)) as run,
        running(folder / "host", case, device=settled_host) as host,
    ):
        for step in range(steps):
            run.step(step)
            host.step(step)
        same_as_host(run, host)
        assert not torch.isfinite(torch.cat(run.partition)).all()


def _gradient(case: Case, parameter: int, step: int) -> torch.Tensor | None:
    """Return normal values in the first half, then smaller ones down to subnormals, and at times special values."""
    if (parameter + step) % 5 == 4:
        return None
    numel = case.shapes[parameter][0]
    generator = np.random.default_rng((step, parameter))
    values = generator.standard_normal(numel, np.float32)
    values[numel // 2 :] *= np.float32(10) ** -(np.arange(numel - numel // 2) % 46).astype(np.float32)
    where = generator.integers(0, max(1, numel // 100), 6)
    if step % 7 == 3:
        values[where] = _SPECIAL
    return torch.from_numpy(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    emulated = EmulatedCards(build())
    emulated.reset()
    for optimizer in options.optimizers:
        for dtype in DTYPES:
            begin = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                compare(Path(folder), emulated.build.xclbin, optimizer, dtype, steps=options.steps, numel=options.numel)
            print(f"{optimizer:8} {dtype!s:15} equal ({time.monotonic() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

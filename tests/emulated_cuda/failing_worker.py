"""Trains on the emulated device until a copy fails: ``python -m tests.emulated_cuda.failing_worker RUNS.json SKIPPED``.

The process ends by the error of the driver, or by torch's if it was torch that noticed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.native.fake_cuda import FakeCuda
from tests.training.worker import parse, train


def main() -> None:
    FakeCuda(Path(os.environ["SMART_INFINITY_EMULATED_CUDA"])).fail_copy(skipped=int(sys.argv[2]))
    (raw,) = json.loads(Path(sys.argv[1]).read_text())
    train(parse(raw))


if __name__ == "__main__":
    main()

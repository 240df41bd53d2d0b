"""Reports the state of its process, then ends as told: ``python -m tests.helpers.reporting_worker FOLDER HOW``.

Every rank writes ``FOLDER/<rank>.json``. HOW is ``well``, ``badly`` (rank 1 raises) or ``never`` (rank 1 is killed);
then the others wait for ever.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only


def main() -> None:
    folder, how, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ.get("RANK", "0"))
    atexit.register((folder / f"ended-{rank}").touch)
    main_module = sys.modules["__main__"]
    assert main_module.__spec__ is not None
    seen = {
        "main": main_module.__spec__.name,
        "lightning's rank": rank_zero_only.rank,
        "environment": dict(os.environ),
        "numpy": float(np.random.rand()),
        "torch": float(torch.rand(())),
        "random": random.random(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    print(f"rank {rank} says so")
    if how != "well" and rank == 1:
        if how == "badly":
            raise RuntimeError("told to")
        os.kill(os.getpid(), signal.SIGKILL)
    while how != "well":
        time.sleep(60)


if __name__ == "__main__":
    main()

"""Trains by transformers' Trainer on GPUs: ``python -m tests.huggingface.gpu_worker MODEL OUT BATCH PRECISION``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.huggingface.trained import train

if __name__ == "__main__":
    out = Path(sys.argv[2])
    outcome = train(Path(sys.argv[1]), out, per_device_train_batch_size=int(sys.argv[3]), bf16=sys.argv[4] == "bf16")
    if os.environ.get("RANK", "0") == "0":
        (out / "losses.json").write_text(json.dumps(outcome.losses))

"""Tests of what this package does to ZeRO-3; DeepSpeed is imported before the strategy that chooses its accelerator."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

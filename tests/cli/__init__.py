"""Tests of the commands; DeepSpeed, which some import, then has the CPU for its accelerator."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

"""Sets a launcher's environment variables for a script that was started as a single process without a launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["launched"]

# Prefix of accelerate's settings. accelerate also sets some itself, which would affect a later Trainer.
_ACCELERATE = "ACCELERATE_"


@contextmanager
def launched() -> Iterator[None]:
    """Set a launcher's environment variables within this context, unless torchrun or another launcher has set them.

    Without them, DeepSpeed looks for MPI, and accelerate creates no process group. When the context ends, accelerate's
    changes to the environment are undone.
    """
    ours = {} if {"RANK", "LOCAL_RANK"} & os.environ.keys() else _one_process()
    before = {name: value for name, value in os.environ.items() if name in ours or name.startswith(_ACCELERATE)}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name in ours or name.startswith(_ACCELERATE)]:
            del os.environ[name]
        os.environ.update(before)


def _one_process() -> dict[str, str]:
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free port: a chosen one may be taken by another script before it is opened
    }

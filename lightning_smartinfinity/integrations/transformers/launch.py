"""Makes a script that was started without a launcher look as if it had been started as one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["launched"]

# Variables of this prefix tell accelerate what to do. It sets some itself, which would bind a later Trainer.
_ACCELERATE = "ACCELERATE_"


@contextmanager
def launched() -> Iterator[None]:
    """Set the variables of a launcher within this context, unless torchrun or another launcher has set them.

    Without them DeepSpeed looks for MPI, and accelerate prepares no process group. What accelerate changes in the
    environment is undone when the context ends.
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
        "MASTER_PORT": "0",  # any: a port that was seen to be free may be another script's by the time it is opened
    }

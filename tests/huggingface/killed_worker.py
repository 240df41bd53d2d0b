"""Trains by transformers' Trainer until it kills itself.

Run it as ``python -m tests.huggingface.killed_worker MODEL OUT STEPS METHOD``: the kill comes when the Trainer calls
this method of its own after this number of steps. It saves every two steps.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import transformers

from tests.huggingface.trained import train


def die_in(method: str, steps: int) -> None:
    """Let the process die when a Trainer calls the method after this number of steps."""
    original = getattr(transformers.Trainer, method)

    def dying(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *args, **kwargs)

    setattr(transformers.Trainer, method, dying)


if __name__ == "__main__":
    die_in(sys.argv[4], int(sys.argv[3]))
    train(Path(sys.argv[1]), Path(sys.argv[2]), save_strategy="steps", save_steps=2)

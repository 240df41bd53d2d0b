"""The random state of one rank, as a checkpoint carries it: the Trainer's by itself, Fabric's as :class:`RandomStates`.

:func:`capture` and :func:`restore` are all that a strategy needs: what the first returns goes into the rank's own part
of the checkpoint, and the second takes it where the draws are to go on.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed

__all__ = ["RNG_KEY", "RandomStates", "capture", "fits", "restore"]

RNG_KEY = "smart_infinity_rng"
"""Key of the random state in what is saved beside the optimizer's state; each rank's file holds its own."""


def capture(device: torch.device, *, world_size: int) -> dict[str, Any]:
    """This rank's global generators: of torch on the CPU and on ``device``, of numpy and of Python.

    Args:
        device: The one that this rank trains on.
        world_size: Number of processes, without which the states mean nothing.
    """
    name, keys, *position = np.random.get_state()
    return {
        "world_size": world_size,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # Without numpy's types, so that torch.load(weights_only=True) takes a checkpoint that was made one file.
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "python": random.getstate(),
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Let this rank's generators go on from what :func:`capture` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def fits(state: Mapping[str, Any], *, world_size: int, warn: bool) -> bool:
    """Whether the state belongs to a run of this many processes.

    Args:
        state: What :func:`capture` returned.
        world_size: Number of processes now.
        warn: Whether this rank is the one to say that it does not.
    """
    if state["world_size"] == world_size:
        return True
    if warn:
        warnings.warn(
            f"The checkpoint was saved by {state['world_size']} processes and is resumed by {world_size}: random "
            "states are not restored, so batches, dropout and augmentations differ from those of a run that never "
            "stopped. Call seed_everything with another seed than the first run's, so that they are not repeated.",
            stacklevel=2,
        )
    return False


class RandomStates:
    """The random generators of every rank, as a part of the state that a loop in Fabric saves and loads.

    What is loaded by as many processes as saved it goes on where it was saved, on each rank; otherwise a warning says
    that it does not. The generators are torch's (on the CPU and on the current CUDA device), numpy's and Python's.

    Example::

        state = {"model": model, "optimizer": optimizer, "random": RandomStates()}
        fabric.save("step.ckpt", state)
        fabric.load("step.ckpt", state)
    """

    def state_dict(self) -> dict[str, Any]:
        """This rank's random states now."""
        return capture(_current_device(), world_size=_world_size())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let this rank's generators go on from there."""
        if fits(state_dict, world_size=_world_size(), warn=not _is_distributed() or torch.distributed.get_rank() == 0):
            restore(state_dict, _current_device())


def _world_size() -> int:
    return torch.distributed.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _current_device() -> torch.device:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")

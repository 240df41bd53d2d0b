"""The random state of a rank in a checkpoint: Trainer saves it by itself, Fabric through :class:`RandomStates`.

A strategy needs only two functions. The result of :func:`capture` goes into the rank's own part of the checkpoint;
:func:`restore` takes it back where the random numbers are to continue.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed

__all__ = ["RNG_KEY", "RandomStates", "capture", "fits", "global_states", "restore", "restore_globals"]

RNG_KEY = "smart_infinity_rng"
"""Key of the random state in what is saved beside the optimizer state; each rank's file holds its own."""


def capture(device: torch.device, *, world_size: int) -> dict[str, Any]:
    """Return the states of this rank's global generators: torch on the CPU and on ``device``, numpy and Python.

    Args:
        device: Device that this rank trains on.
        world_size: Number of processes; the states are meaningless with another number.
    """
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"world_size": world_size, "cuda": cuda, **global_states()}


def global_states() -> dict[str, Any]:
    """Return the states of the global generators on the CPU, in types of ``torch.load`` with ``weights_only=True``."""
    name, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "python": random.getstate(),
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Continue this rank's generators from a result of :func:`capture`."""
    restore_globals(state)
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def restore_globals(states: Mapping[str, Any]) -> None:
    """Restore the global generators on the CPU from a result of :func:`global_states`."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


def fits(state: Mapping[str, Any], *, world_size: int, warn: bool) -> bool:
    """Return whether the state belongs to a run of this many processes.

    Args:
        state: Result of :func:`capture`.
        world_size: Number of processes now.
        warn: Whether this rank warns if the state does not fit.
    """
    if state["world_size"] == world_size:
        return True
    if warn:
        before = "1 process" if state["world_size"] == 1 else f"{state['world_size']} processes"
        warnings.warn(
            f"The training was saved by {before} and is resumed by {world_size}: random "
            "states are not restored, so batches, dropout and augmentations differ from those of a run that never "
            "stopped. Call seed_everything with another seed than the first run's, so that they are not repeated.",
            stacklevel=2,
        )
    return False


class RandomStates:
    """The random generators of every rank, as a part of the state that a Fabric loop saves and loads.

    If as many processes load as saved, each rank's generators continue; otherwise they do not, and a warning says so.
    The generators are torch's (on the CPU and on the current CUDA device), numpy's and Python's.

    Example::

        state = {"model": model, "optimizer": optimizer, "random": RandomStates()}
        fabric.save("step.ckpt", state)
        fabric.load("step.ckpt", state)
    """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's present random states."""
        return capture(_current_device(), world_size=_world_size())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue this rank's generators from these states."""
        if fits(state_dict, world_size=_world_size(), warn=not _is_distributed() or torch.distributed.get_rank() == 0):
            restore(state_dict, _current_device())


def _world_size() -> int:
    return torch.distributed.get_world_size() if _is_distributed() else 1


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _current_device() -> torch.device:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")

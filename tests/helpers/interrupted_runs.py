"""Trainings in processes of their own, which are interrupted and resumed: their launch, their kill and their end."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from tests.helpers.processes import run_module


def launch_run(module: str, run: Any) -> tuple[int, str]:
    """Run a module in forked processes; return the exit status and the output.

    Args:
        module: A module whose argument is the path of a run as JSON.
        run: The run, a dataclass with the folder ``out`` and the number of processes ``devices``.
    """
    config = Path(run.out) / "run.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(dataclasses.asdict(run)))
    done = run_module(module, config, ranks=run.devices)
    return done.returncode, done.stdout + done.stderr


def kill_later(seconds: float) -> None:
    """Kill this process after so many seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def state_digest(optimizer: Any, module: torch.nn.Module) -> str:
    """Return a digest of this rank's state on storage and of the module's buffers."""
    digest = hashlib.sha256()
    optimizer.update.drain()
    optimizer.rank_state.handler.state.scan(lambda window: digest.update(b"".join(a.tobytes() for a in window.arrays)))
    for name, buffer in module.named_buffers():
        digest.update(name.encode() + buffer.float().cpu().numpy().tobytes())
    return digest.hexdigest()

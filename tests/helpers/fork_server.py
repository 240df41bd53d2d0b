"""Forks processes that have everything imported: ``python -m tests.helpers.fork_server DESCRIPTOR``.

Importing torch, Lightning and DeepSpeed takes several seconds, most of the time of a small training in its own process.
The server imports them once, does nothing else, and forks for every job that arrives on its socket (a line of JSON,
answered by the exit status). A forked process starts with the server's memory, in which nothing was computed. It runs
the module as ``python -m`` does and ends as an interpreter does.

Ranks learn their numbers from the environment, as under torchrun. They share one hash seed, unlike interpreters that
Lightning starts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.helpers.waiting import LIMIT, PROCESS_LIMIT

# Most of these are imported only when an engine starts.
PRELOADED = (
    "lightning_smartinfinity.strategy",
    "lightning_smartinfinity.fabric",
    "lightning_smartinfinity.callbacks",
    "lightning_smartinfinity.zero3.clipping",
    "lightning_smartinfinity.zero3.engine",
    "lightning_smartinfinity.zero3.storage",
    "lightning_smartinfinity.zero3.update_device",
    "deepspeed.module_inject",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "setuptools",
)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    # Garbage collection in the forked processes then leaves these pages alone, so they stay shared.
    gc.collect()
    gc.freeze()
    job = _serve(control)
    if job is not None:
        control.close()
        sys.argv[1:] = job["arguments"]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job. Return the job in a process forked for it, and None in the server when there are no more."""
    with control.makefile("rw") as lines:
        for line in lines:
            job: dict[str, Any] = json.loads(line)
            ranks = set()
            for environment in job["environments"]:
                if (rank := os.fork()) == 0:
                    _become(job, environment)
                    return job
                ranks.add(rank)
            print(_wait(ranks), file=lines, flush=True)
    return None


def _become(job: dict[str, Any], environment: dict[str, str]) -> None:
    """Give a forked process the output, environment and random seeds that a new one would have."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", "0"))  # as Lightning finds it when it is imported
    np.random.seed()
    torch.seed()


def _wait(ranks: set[int]) -> int:
    """Return 0, or the first exit status that is not 0, after which the other ranks are killed.

    If the process that sent the job does not stop the server in time, the server ends itself and all that it forked.
    """
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(round(PROCESS_LIMIT + LIMIT))
    first = 0
    while ranks:
        rank, status = os.wait()
        ranks.discard(rank)
        if first == 0 and (first := os.waitstatus_to_exitcode(status)) != 0:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    signal.alarm(0)
    return first


if __name__ == "__main__":
    main()

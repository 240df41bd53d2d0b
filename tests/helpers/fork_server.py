"""Forks processes that have everything imported: ``python -m tests.helpers.fork_server SOCKET``.

Importing torch, Lightning and DeepSpeed takes several seconds, most of the time of a small training in its own process.
The server imports them once, does nothing else, and forks for every process that connects to its socket. This fork
first sends its number, and then forks for every job that arrives (a line of JSON, answered by the exit status). The
server ends when its standard input does.

The process of a job starts with the server's memory, in which nothing was computed. It runs the module as ``python -m``
does. In the end it waits for threads and calls what ``atexit`` has, as an interpreter does, but takes no module apart,
which would take as long as a small training and copy the server's memory.

Ranks learn their numbers from the environment, as under torchrun. They share one hash seed, unlike interpreters that
Lightning starts.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from tests.helpers.streamed_state import stream_state
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT

# Most of these are imported only when an engine starts.
PRELOADED = (
    "lightning_smartinfinity.integrations.trainer.strategy",
    "lightning_smartinfinity.integrations.fabric.strategy",
    "lightning_smartinfinity.integrations.trainer.callbacks",
    "lightning_smartinfinity.zero3.optimizer.clipping",
    "lightning_smartinfinity.zero3.engine.training",
    "lightning_smartinfinity.zero3.setup.open_storage",
    "lightning_smartinfinity.zero3.setup.update_device",
    "deepspeed.module_inject",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "setuptools",
)


def main() -> None:
    # Clients may connect from now on; they are answered when everything is imported.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        stream_state()
        for name in PRELOADED:
            importlib.import_module(name)
        # Garbage collection in the forked processes then leaves these pages alone, so they stay shared.
        gc.collect()
        gc.freeze()
        control = _accept(listener)
    job = None if control is None else _serve(control)
    if job is not None:
        sys.argv[1:] = job["arguments"]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
    _end()


def _accept(listener: socket.socket) -> socket.socket | None:
    """Fork for each client. Return its socket in the forked process, and None in the server when it is to end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those processes
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            client.sendall(f"{os.getpid()}\n".encode())
            return client
        client.close()


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each job. Return the job in a process forked for it, and None in the server when there are no more."""
    with control.makefile("rw") as lines:
        for line in lines:
            job: dict[str, Any] = json.loads(line)
            ranks = set()
            for environment in job["environments"]:
                if (rank := os.fork()) == 0:
                    control.close()
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


def _end() -> NoReturn:
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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

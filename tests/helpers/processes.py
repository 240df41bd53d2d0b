"""Runs modules in processes of their own that need not import everything anew."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT

__all__ = ["REPOSITORY", "environments_of", "run_module"]

REPOSITORY = Path(__file__).resolve().parents[2]


def run_module(module: str, *arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments`` in forked processes (see :mod:`tests.helpers.fork_server`).

    This is for runs on the CPU that test neither the imports nor the launcher.

    Args:
        module: A module of the repository.
        *arguments: Its arguments.
        ranks: Processes; more than one find each other as if torchrun had started them.
    """
    command = [module, *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        job = {
            "module": module,
            "arguments": command[1:],
            "environments": environments_of(ranks),
            "stdout": stdout.name,
            "stderr": stderr.name,
        }
        status = _server().run(job)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


def environments_of(ranks: int) -> list[dict[str, str]]:
    """Return the environments of ranks that find each other as if torchrun had started them."""
    if ranks == 1:
        return [fresh_environment()]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": str(ranks)}
    return [
        {**fresh_environment(), **group, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]


class _Server:
    """A fork server and the socket to it; ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(theirs.fileno())],
            cwd=REPOSITORY,
            # Before a fork there may be no threads, and DeepSpeed chooses an accelerator as it is imported.
            env={**fresh_environment(), "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.kill)

    def run(self, job: dict[str, object]) -> int:
        """Run a job and return its exit status. If it takes too long, kill the server and all that it forked."""
        self._control.settimeout(PROCESS_LIMIT)
        try:
            with self._control.makefile("rw") as lines:
                print(json.dumps(job), file=lines, flush=True)
                return int(lines.readline())
        except BaseException:
            self.kill()
            _server.cache_clear()
            raise

    def kill(self) -> None:
        """Kill the server and all that it forked at once."""
        atexit.unregister(self.kill)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(LIMIT)
        self._control.close()


@functools.cache
def _server() -> _Server:
    """Return the server of this process, which is started when first needed."""
    return _Server()

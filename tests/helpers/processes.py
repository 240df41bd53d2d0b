"""Runs modules in processes of their own that need not import everything anew."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.helpers.fresh_python import SOCKET, fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT, await_that

__all__ = ["REPOSITORY", "environments_of", "run_module", "start_server"]

REPOSITORY = Path(__file__).resolve().parents[2]


def run_module(
    module: str, *arguments: str | Path, ranks: int = 1, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module arguments`` in forked processes (see :mod:`tests.helpers.fork_server`).

    This is for runs on the CPU that test neither the imports nor the launcher.

    Args:
        module: A module of the repository.
        *arguments: Its arguments.
        ranks: Processes; more than one find each other as if torchrun had started them.
        env: Further environment variables, which nothing reads as it is imported.
    """
    command = [module, *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        job = {
            "module": module,
            "arguments": command[1:],
            "environments": [{**of_rank, **(env or {})} for of_rank in environments_of(ranks)],
            "stdout": stdout.name,
            "stderr": stderr.name,
        }
        status = _client().run(job)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


def environments_of(ranks: int) -> list[dict[str, str]]:
    """Return the environments of ranks that find each other as if torchrun had started them."""
    if ranks == 1:
        return [fresh_environment()]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        {**fresh_environment(), **group, "NODE_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(ranks)
    ]


def start_server() -> None:
    """Start the server from which this process, and those that it starts, fork; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="fork-server-")
    path = Path(folder, "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.fork_server", path],
        cwd=REPOSITORY,
        # Before a fork there may be no threads, and DeepSpeed chooses an accelerator as it is imported.
        env={**fresh_environment(), "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.PIPE,
    )
    os.environ[SOCKET] = str(path)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(process.kill)


class _Client:
    """A connection to the server; what was forked for it ends with this process."""

    def __init__(self) -> None:
        if SOCKET not in os.environ:
            start_server()
        self._control = socket.socket(socket.AF_UNIX)
        await_that(self._connects)
        self._control.settimeout(PROCESS_LIMIT)
        self._lines = self._control.makefile("rw")
        self._group = int(self._lines.readline())
        atexit.register(self.kill)

    def _connects(self) -> bool:
        try:
            self._control.connect(os.environ[SOCKET])
        except (FileNotFoundError, ConnectionRefusedError):  # the server has just been started
            return False
        return True

    def run(self, job: dict[str, object]) -> int:
        """Run a job and return its exit status. If it takes too long, kill all that was forked."""
        try:
            print(json.dumps(job), file=self._lines, flush=True)
            return int(self._lines.readline())
        except BaseException:
            self.kill()
            _client.cache_clear()
            raise

    def kill(self) -> None:
        """Kill all that was forked for this process."""
        atexit.unregister(self.kill)
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        self._control.close()


@functools.cache
def _client() -> _Client:
    """Return the connection of this process, which is made when first needed."""
    return _Client()

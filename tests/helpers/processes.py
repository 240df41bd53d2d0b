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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.fresh_python import SOCKET, fresh_environment
from tests.helpers.waiting import PROCESS_LIMIT, await_that

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
    with (
        tempfile.NamedTemporaryFile("r") as stdout,
        tempfile.NamedTemporaryFile("r") as stderr,
        environments_of(ranks) as environments,
    ):
        job = {
            "module": module,
            "arguments": command[1:],
            "environments": [{**of_rank, **(env or {})} for of_rank in environments],
            "stdout": stdout.name,
            "stderr": stderr.name,
        }
        status = _client().run(job)
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


@contextmanager
def environments_of(ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environments of ranks that find each other as if torchrun had started them; one has its port only.

    Nobody else is given the port before the context is left: it is bound here, so that only who asks for it can use it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does, which is to listen there
        reserved.bind(("127.0.0.1", 0))
        of_all = {**fresh_environment(), "MASTER_PORT": str(reserved.getsockname()[1])}
        if ranks == 1:
            yield [of_all]
            return
        group = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
        yield [{**of_all, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


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


class Client:
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
def _client() -> Client:
    """Return the connection of this process, which is made when first needed."""
    return Client()

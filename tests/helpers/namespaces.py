"""Two machines on this one: host names, boot ids, disks and networks of their own, and one file system that both mount.

The file system caches failed look-ups, as NFS does: bindfs mounts one folder once for each machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.runif import NO_NAMESPACES
from tests.helpers.waiting import PROCESS_LIMIT

__all__ = ["TwoMachines", "why_no_namespaces"]

_COMMANDS = ("ip", "unshare", "bindfs", "fusermount", "mount", "hostname")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PORT = "29511"


def why_no_namespaces() -> str | None:
    """Return why there cannot be two machines here; None if there can."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{NO_NAMESPACES}: {', '.join(missing)} not installed"
    if not os.access("/dev/fuse", os.W_OK):
        return f"{NO_NAMESPACES}: no access to /dev/fuse"
    name = f"si-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"{NO_NAMESPACES}: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class TwoMachines:
    """Machines ``node0`` and ``node1`` with a link between them; :meth:`close` removes them.

    Both see ``shared``, and a failed look-up there is remembered. Each sees a disk of its own as ``local``.

    Args:
        folder: Folder for the file systems.
        seconds: How long a failed look-up is remembered.
    """

    def __init__(self, folder: Path, *, seconds: int = 30) -> None:
        self.shared, self.local = folder / "shared", folder / "local"
        self.folder = folder
        self._names = [f"si-{os.getpid()}-{rank}" for rank in range(2)]
        self._opened = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._make(seconds)
            undo.pop_all()

    def _make(self, seconds: int) -> None:
        for name in ("shared", "local", "filer"):
            (self.folder / name).mkdir()
        for rank, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            self._opened.callback(_run, "ip", "netns", "delete", name)
            (self.folder / f"disk-{rank}").mkdir()
            (self.folder / f"boot-{rank}").write_text(f"boot of node{rank}\n")
            view = self.folder / f"view-{rank}"
            view.mkdir()
            _run("bindfs", "-o", f"negative_timeout={seconds}", self.folder / "filer", view)
            self._opened.callback(_run, "fusermount", "-uz", view)
        _run(
            "ip", "link", "add", "si0", "netns", self._names[0], "type", "veth", "peer", "si1", "netns", self._names[1]
        )
        for rank in range(2):
            self._ip(rank, "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"si{rank}")
            self._ip(rank, "link", "set", f"si{rank}", "up")
            self._ip(rank, "link", "set", "lo", "up")

    def start(self, rank: int, *command: str | Path) -> subprocess.Popen[str]:
        """Start a command on a machine, with the variables by which ranks find each other."""
        of_group = {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": _PORT,
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": f"si{rank}",
            "DS_ACCELERATOR": "cpu",
        }
        becoming = (
            f"hostname node{rank} && mount --bind {self.folder}/disk-{rank} {self.local}"
            f" && mount --bind {self.folder}/view-{rank} {self.shared}"
            f' && mount --bind {self.folder}/boot-{rank} {_BOOT_ID} && exec "$@"'
        )
        inside = ["unshare", "--mount", "--uts", "bash", "-c", becoming, "bash", *map(str, command)]
        with self.output(rank).open("w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[rank], *inside],
                cwd=REPOSITORY,
                env={**fresh_environment(), **of_group},
                stdout=output,
                stderr=output,
                text=True,
            )

    @contextmanager
    def started(self, *command: str | Path, other: Sequence[str | Path] = ()) -> Iterator[list[subprocess.Popen[str]]]:
        """Start a command on both machines, or another one on the second; kill what still runs in the end."""
        processes = [self.start(rank, *(other if rank and other else command)) for rank in range(2)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def run(self, *command: str | Path) -> list[int]:
        """Run a command of Python's on both machines and return the exit statuses."""
        with self.started(sys.executable, *command) as processes:
            return [process.wait(PROCESS_LIMIT) for process in processes]

    def output(self, rank: int) -> Path:
        """Return the path of what a machine has said."""
        return self.folder / f"output-{rank}"

    def cut_link(self) -> None:
        """Let no packet pass between the machines any more."""
        self._ip(1, "link", "set", "si1", "down")

    def close(self) -> None:
        """Remove the machines; idempotent."""
        self._opened.close()

    def _ip(self, rank: int, *arguments: str) -> None:
        _run("ip", "-netns", self._names[rank], *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=PROCESS_LIMIT)

"""Runs code in a new interpreter: what is imported first, and what is imported at all, can only be tested there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.helpers.waiting import PROCESS_LIMIT

SOCKET = "SMART_INFINITY_TEST_FORK_SERVER"
"""Name of the environment variable with the path of the fork server's socket (see :mod:`tests.helpers.processes`)."""


def fresh_python(code: str, *arguments: str, cwd: Path, autoload: bool = True, **environment: str) -> str:
    """Run code outside the checkout and return what it prints.

    Args:
        code: Python source; its arguments are in ``sys.argv[1:]``.
        *arguments: Passed to the code.
        cwd: Working folder; not the checkout, whose folder would hide the installed package.
        autoload: Whether torch calls the entry points of the group ``torch.backends``.
        **environment: Further environment variables.

    Raises:
        AssertionError: The code failed; the message holds all that it printed.
    """
    variables = {**fresh_environment(), **environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    variables.pop("PYTHONPATH", None)
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert completed.returncode == 0, f"status {completed.returncode}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


def fresh_environment() -> dict[str, str]:
    """Return the environment without what an earlier fit in this process, or its launcher, left in it."""
    left = {
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "NODE_RANK",
        "LOCAL_SIZE",
        "DS_ACCELERATOR",
        SOCKET,
    }
    return {name: value for name, value in os.environ.items() if name not in left and not name.startswith("PL_")}

"""Runs every situation for systems in processes of their own: ``python -m tests.stock.forked FOLDER SYSTEM...``.

The processes are forked from this one, which has imported everything. Rank 0 saves the result or the error to
``FOLDER/<devices>/<system>/<name>.pt``.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

# One thread only, since a process with more must not be forked.
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

import torch

from tests.helpers.processes import reserved_port
from tests.stock.situations import ON_ONE, ON_TWO
from tests.stock.systems import maker

SITUATIONS = {1: ON_ONE, 2: ON_TWO}
TIMEOUT_SECONDS = 120
# A first fit would import these.
LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "lightning_smartinfinity.zero3.engine.training",
)


def run(system: str, name: str, folder: Path, devices: int) -> None:
    """Run a situation in this process and save its outcome."""
    root = folder / name
    root.mkdir(parents=True, exist_ok=True)
    outcome: dict[str, Any] = {}
    try:
        outcome["result"] = SITUATIONS[devices][name](maker(system, root, devices), root)
    except Exception as error:
        traceback.print_exc()
        outcome["error"] = f"{type(error).__name__}: {error}"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        torch.save(outcome, folder / f"{name}.pt")


def fork(system: str, name: str, folder: Path, **environment: str) -> int:
    """Fork a process that runs one rank, and return its number."""
    child = os.fork()
    if child:
        return child
    signal.alarm(TIMEOUT_SECONDS)
    os.environ |= environment
    try:
        run(system, name, folder, int(environment.get("LOCAL_SIZE", "1")))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def fork_ranks(system: str, name: str, folder: Path, devices: int) -> None:
    """Fork all ranks and wait for them; with these variables Lightning launches none itself."""
    children = []
    with reserved_port() as port:
        for rank in range(devices):
            launched = (
                {"LOCAL_RANK": str(rank), "LOCAL_SIZE": str(devices), "MASTER_PORT": str(port)} if devices > 1 else {}
            )
            children.append(fork(system, name, folder, **launched))
        for child in children:
            os.waitpid(child, 0)


def main() -> None:
    for module in LATE:
        importlib.import_module(module)
    # DeepSpeed collects garbage in every set-up. Freezing excludes all that is imported.
    gc.freeze()
    for devices, situations in SITUATIONS.items():
        for system, name in itertools.product(sys.argv[2:], situations):
            # Plain Lightning runs on one process only.
            if (system, devices) != ("plain", 2):
                fork_ranks(system, name, Path(sys.argv[1]) / str(devices) / system, devices)


if __name__ == "__main__":
    main()

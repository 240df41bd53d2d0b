"""Computes metrics on two ranks: ``python -m tests.callbacks.metrics_worker FOLDER``.

Every rank saves its values to ``FOLDER/rank<n>.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_smartinfinity.integrations.trainer.metrics import (
    BytesPerParameter,
    StorageBandwidth,
    StorageBytes,
    StorageCounters,
    StorageWait,
)
from tests.callbacks.test_metrics import ONE, TWO


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    metrics = {
        "bytes": StorageBytes(),
        "bandwidth": StorageBandwidth("shared"),
        "wait max": StorageWait(),
        "wait mean": StorageWait("mean"),
        "per parameter": BytesPerParameter(),
    }
    for metric in metrics.values():
        metric.update(TWO if rank else ONE, seconds=2.0 + rank)
    counted = StorageCounters()
    counted.update(TWO if rank else ONE)
    gathers, all_gather = [], dist.all_gather

    def counting(*args: object, **kwargs: object) -> object:
        gathers.append(1)
        return all_gather(*args, **kwargs)

    dist.all_gather = counting
    counted.compute()
    dist.all_gather = all_gather
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    again = {name: metric.compute().item() for name, metric in metrics.items()}
    metrics["bytes"].update(ONE)
    torch.save(
        {"values": values, "again": again, "gathers": len(gathers), "more": metrics["bytes"].compute().item()},
        folder / f"rank{rank}.pt",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

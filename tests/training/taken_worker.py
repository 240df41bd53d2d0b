"""Trains with hooks and an earlier state in two processes: ``python -m tests.training.taken_worker FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.fabric.worker import quiet_fabric
from tests.training.test_taken_optimizer import DATA, Net, stepped_with_hook


def main() -> None:
    root = Path(sys.argv[1])
    fabric = quiet_fabric(root / "storage", devices=2)
    net = Net()
    model, optimizer = fabric.setup(net, stepped_with_hook(net))
    losses = []
    for batch in DATA.split(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch.chunk(2)[fabric.global_rank])["loss"]
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        fabric.backward(loss)
        optimizer.step()
    called = torch.tensor(float(net.seen.count("before")))
    if fabric.global_rank == 0:
        (root / "losses.json").write_text(json.dumps([losses, float(called)]))
    fabric.strategy.close()


if __name__ == "__main__":
    main()

"""Runs writes to parameters in 16 bit on two ranks, and a training that is resumed, for test_unrounded.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers.trainers import quiet_trainer
from tests.training.test_unrounded import TWO_RANKS, Distilled, follow, ours


def main() -> None:
    """Save by rank what each training has found."""
    root = Path(sys.argv[1])
    settings: dict[str, Any] = {"devices": 2, "precision": "bf16-mixed", "use_distributed_sampler": False}
    found = {}
    for write in TWO_RANKS:
        module = Distilled(write)
        quiet_trainer(root, ours(root), **settings).fit(module)
        found[write.__name__] = module.found
    module.write = None
    quiet_trainer(root, ours(root), **settings).fit(module)
    found["second fit"] = module.found
    whole, resumed = Distilled(follow, lr=0.1), Distilled(follow, lr=0.1)
    quiet_trainer(root, ours(root), max_steps=4, **settings).fit(whole)
    begun = quiet_trainer(root, ours(root), max_steps=2, **settings)
    begun.fit(Distilled(follow, lr=0.1))
    begun.save_checkpoint(root / "two.ckpt")
    again = quiet_trainer(root, ours(root), max_steps=4, **settings)
    again.fit(resumed, ckpt_path=root / "two.ckpt", weights_only=False)
    found |= {"whole": whole.found, "resumed": resumed.found}
    torch.save(found, root / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()

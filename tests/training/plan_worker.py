"""Trains two ranks that see different memory, with a plan and without: ``python -m tests.training.plan_worker FOLDER``.

Every rank writes its losses, and the settings that were chosen, to ``rank-<n>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.planning import choice, needs
from lightning_smartinfinity.planning.needs import PROCESS_BYTES
from tests.helpers.models import Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import SMALL_RING
from tests.training.test_parameter_budget import Configured

RECIPE = Recipe(precision="bf16-true", width=64, depth=6, max_steps=3)


def main() -> None:
    """Train twice."""
    root = Path(sys.argv[1])
    choice.BUDGETS = (256 << 10, 64 << 10)
    needs._TRANSFER_BYTES = 16 << 10  # else as much as all parameters of a tiny model
    rank = int(os.environ.get("RANK", "0"))
    plans: dict[str, Any] = {
        "expected": None,
        "losses": {"host_memory": 2 * PROCESS_BYTES + (1_500_000 if rank else 10**9)},
    }
    seen: dict[str, Any] = {}
    for name, plan in plans.items():
        strategy = SmartInfinityStrategy(root / name, plan=plan, transfer=SMALL_RING, overlap="none")
        module = Configured(RECIPE)
        trainer = quiet_trainer(root, strategy, devices=2, max_steps=RECIPE.max_steps, precision=RECIPE.precision)
        trainer.fit(module)
        seen[name] = module.losses
        seen["settings"] = [str(strategy._settings.zero), str(strategy._settings.transfer)]
        strategy.close()
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

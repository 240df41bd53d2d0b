"""Counts the parameters in memory of two ranks: ``python -m tests.training.parameter_budget_worker FOLDER BUDGET``.

Every rank writes its losses, its largest number of bytes at a time and the warnings to ``rank-<n>.json``. BUDGET is 0
for a training with its parameters in memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer

RECIPE = Recipe(precision="bf16-mixed", width=64, depth=3, tied=False, max_steps=4)


def main() -> None:
    """Train, and count after every gather."""
    root, budget = Path(sys.argv[1]), int(sys.argv[2])
    zero: dict[str, Any] | None = {"offload_param": {"device": "nvme"}} if budget else None
    transfer: dict[str, Any] = {"keep": False, **({"parameter_bytes": budget} if budget else {})}
    strategy = SmartInfinityStrategy(root / "storage", zero=zero, transfer=transfer)
    trainer = quiet_trainer(root, strategy, devices=2, max_steps=RECIPE.max_steps, precision=RECIPE.precision)
    module = LitTiny(RECIPE)
    most, fetch = [0], PartitionedParameterCoordinator.fetch_sub_module

    def counting(coordinator: Any, sub_module: Any, forward: bool) -> None:
        fetch(coordinator, sub_module, forward)
        gathered = [p for p in module.parameters() if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
        partitions = strategy._parameters._memory.nbytes if strategy._parameters is not None else 0
        most[0] = max(most[0], partitions + sum(p.ds_numel_aligned * p.dtype.itemsize for p in gathered))

    PartitionedParameterCoordinator.fetch_sub_module = counting
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(module)
    strategy.close()
    said = [str(warning.message) for warning in seen if "in use at once" in str(warning.message)]
    outcome = {"losses": module.losses, "most": most[0], "warnings": said}
    (root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()

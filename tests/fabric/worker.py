"""Runs a user's own Fabric loop in processes of its own: ``python -m tests.fabric.worker RUNS.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from tests.helpers.models import Recipe
from tests.training.worker import Outcome, Run, launch as launch_runs


def launch(*runs: Run) -> list[Outcome]:
    """Train runs in turn in fresh processes."""
    return launch_runs(*runs, worker="tests.fabric.worker")


def quiet_fabric(storage: Path | str | None = None, **settings: Any) -> Fabric:
    """Return a launched Fabric on one CPU, or with the given settings."""
    from lightning_smartinfinity import SmartInfinityFabricStrategy

    strategy = SmartInfinityFabricStrategy(storage, **settings.pop("options", {}))
    fabric = Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": strategy, **settings})
    fabric.launch()
    return fabric


def train(run: Run) -> Outcome:
    """Run the loop in this process and in those that Fabric launches."""
    from lightning_smartinfinity import TransferConfig

    recipe = run.recipe
    fabric = quiet_fabric(
        Path(run.out) / "storage",
        accelerator=run.accelerator,
        devices=run.devices,
        precision=recipe.precision,
        options={"transfer": TransferConfig(**run.transfer), **run.options},
    )
    module, model, optimizer = recipe.set_up(fabric)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if recipe.scheduler is not None:
        state["scheduler"] = recipe.build_scheduler(optimizer)
    if run.resume is not None:
        fabric.load(run.resume, state)
    losses: list[float] = []
    skipped: list[int] = []
    for step in range(state["step"], recipe.max_steps):
        losses += _window(fabric, model, recipe, step)
        if recipe.clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=recipe.clip, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if recipe.scheduler is not None:
            state["scheduler"].step()
        skipped += [step] if optimizer.overflow else []
        state["step"] = step + 1
        if state["step"] in run.save_at:
            fabric.save(Path(run.out) / f"step-{state['step']}.ckpt", state)
    inner = optimizer.engine.optimizer
    masters = {
        name: inner.get_full_hp_param(param).cpu().clone()
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    extra = {
        "rank": fabric.global_rank,
        "skipped": skipped,
        "loss_scale": optimizer.loss_scale,
        "steps": inner.update.drained_handler().steps.tolist(),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "state_entries": len(vars(inner.optimizer).get("state", ())),
    }
    fabric.strategy.close()
    return Outcome(losses, masters, extra, "")


def _window(fabric: Fabric, model: Any, recipe: Recipe, step: int) -> list[float]:
    """Run forward and backward for a step's micro-batches, scaled by the loop itself."""
    losses = []
    num_micro = recipe.window(step)
    for micro in range(num_micro):
        batch = recipe.batch(step * recipe.accumulate + micro, fabric.global_rank, fabric.world_size)
        with fabric.no_backward_sync(model, enabled=micro + 1 < num_micro):
            loss = model(batch.to(fabric.device), use_side=step not in recipe.skip_side_at)
            losses.append(float(loss.detach()))
            if step in recipe.nan_at and recipe.nan_rank in (None, fabric.global_rank):
                loss = loss * float("nan")
            fabric.backward(loss / recipe.accumulate)
    return losses


def main() -> None:
    for raw in json.loads(Path(sys.argv[1]).read_text()):
        recipe = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.pop("recipe").items()}
        run = Run(recipe=Recipe(**recipe), **{**raw, "save_at": tuple(raw["save_at"])})
        outcome = train(run)
        out = Path(run.out)
        out.mkdir(parents=True, exist_ok=True)
        rank = outcome.extra.pop("rank")
        (out / f"losses-{rank}.json").write_text(json.dumps({"losses": outcome.losses, **outcome.extra}))
        if rank == 0:
            torch.save(outcome.masters, out / "masters.pt")


if __name__ == "__main__":
    main()

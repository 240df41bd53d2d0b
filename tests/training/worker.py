"""Trains in processes of their own: ``python -m tests.training.worker RUNS.json``.

RUNS.json holds a list of :class:`Run`. Every rank writes ``losses-<rank>.json`` and rank 0 ``masters.pt`` to its
``out`` folder.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.helpers import native_testing as testing
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import REPOSITORY, run_module
from tests.helpers.ranks import on_ranks
from tests.helpers.waiting import PROCESS_LIMIT


@dataclass(frozen=True)
class Run:
    """A recipe and where to run it."""

    out: str
    recipe: Recipe
    devices: int = 1
    accelerator: str = "cpu"
    deterministic: bool = False
    resume: str | None = None
    save_after_fit: str | None = None
    save_at: tuple[int, ...] = ()
    storage: str | list[str] | None = None
    # A seed that makes transfers of optimizer state end late and out of order.
    delays: int | None = None
    delay_us: int = 4000
    transfer: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    losses: list[float]
    masters: dict[str, torch.Tensor]
    extra: dict[str, Any]
    output: str


def launch(
    *runs: Any, env: dict[str, str] | None = None, anew: bool = False, worker: str = "tests.training.worker"
) -> list[Outcome]:
    """Train runs in turn in fresh processes and return rank 0's result of each.

    All runs must use the same number of devices.

    Args:
        *runs: Runs of the dataclass that the worker parses.
        env: Further environment variables.
        anew: Whether every process is a new interpreter and Lightning starts the other ranks, as always on a GPU.
            Otherwise the processes are forked.
        worker: Module to run.
    """
    assert len({run.devices for run in runs}) == 1
    config = Path(runs[0].out) / "runs.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps([dataclasses.asdict(run) for run in runs]))
    if anew or runs[0].accelerator != "cpu":
        done = _run_anew(worker, config, env or {})
    else:
        done = run_module(worker, config, ranks=runs[0].devices, env=env)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return [_outcome(Path(run.out), output) for run in runs]


def each_rank(scenario: str, root: Path, *arguments: object, ranks: int = 2) -> list[dict[str, Any]]:
    """Run a function of :mod:`tests.training.rank_worker` on forked ranks and return what every one found."""
    from tests.training import rank_worker  # which imports tests that import this module

    root.mkdir(exist_ok=True)
    return on_ranks(getattr(rank_worker, scenario), root, *map(str, arguments), ranks=ranks)


def _run_anew(worker: str, config: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", worker, str(config)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
        env={**fresh_environment(), **env},
    )


def _outcome(out: Path, output: str) -> Outcome:
    extra = json.loads((out / "losses-0.json").read_text())
    return Outcome(extra.pop("losses"), torch.load(out / "masters.pt", weights_only=True), extra, output)


class Recorder(pl.Callback):
    """Saves checkpoints at given steps and collects the fp32 masters when training ends."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.masters: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] = {}
        self.skipped: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.run.delays is not None:
            optimizer = trainer.strategy.optimizers[0]
            delayed = [optimizer.update.drained_handler()._device._pipeline]
            if optimizer.rank_state.activations is not None:
                delayed.append(optimizer.rank_state.activations._store.files.tensors.core)
            for target in delayed:
                testing.inject(target, seed=self.run.delays, max_delay_us=self.run.delay_us, short_transfer_every=3)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.strategy.optimizers[0].overflow and not trainer.fit_loop._should_accumulate():
            self.skipped.append(trainer.global_step - 1)
        if trainer.global_step in self.run.save_at and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(Path(self.run.out) / f"step-{trainer.global_step}.ckpt")

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        optimizer = trainer.strategy.optimizers[0]
        for name, param in pl_module.model.named_parameters():
            if param.requires_grad:
                self.masters[name] = optimizer.get_full_hp_param(param).cpu().clone()
        self.extra = {
            "skipped": self.skipped,
            "loss_scale": float(optimizer.loss_scale),
            "steps": optimizer.update.drained_handler().steps.tolist(),
            "generation": int(optimizer.update.drained_handler().generation),
            "state_entries": len(vars(optimizer).get("state", ())),
            "fp32_numel": sum(p.numel() for p in optimizer.fp32_partitioned_groups_flat),
            "lr": [group["lr"] for group in optimizer.param_groups],
        }


def prepared(run: Run, *callbacks: pl.Callback) -> tuple[LitTiny, pl.Trainer, Recorder]:
    """Return what :func:`train` will train."""
    from lightning_smartinfinity import SmartInfinityStrategy, TopK, TransferConfig

    recipe, recorder = run.recipe, Recorder(run)
    options = dict(run.options)
    if isinstance(options.get("compression"), dict):  # the form that a codec has in JSON
        options["compression"] = TopK(**options["compression"])
    storage = run.storage or str(Path(run.out) / "storage")
    strategy = SmartInfinityStrategy(storage, transfer=TransferConfig(**run.transfer), **options)
    trainer = pl.Trainer(
        accelerator=run.accelerator,
        devices=run.devices,
        strategy=strategy,
        precision=recipe.precision,  # type: ignore[arg-type]
        max_steps=recipe.max_steps,
        deterministic=run.deterministic,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.out,
    )
    return LitTiny(recipe), trainer, recorder


def train(run: Run, *callbacks: pl.Callback) -> tuple[LitTiny, pl.Trainer, Recorder]:
    """Train in this process and in those that Lightning launches."""
    module, trainer, recorder = prepared(run, *callbacks)
    trainer.fit(module, ckpt_path=run.resume)
    if run.save_after_fit:
        trainer.save_checkpoint(run.save_after_fit)
    return module, trainer, recorder


def parse(raw: dict[str, Any]) -> Run:
    """Return a run from its JSON form."""
    recipe = Recipe(**raw.pop("recipe"))
    recipe = dataclasses.replace(recipe, skip_side_at=tuple(recipe.skip_side_at), nan_at=tuple(recipe.nan_at))
    return Run(recipe=recipe, **{**raw, "save_at": tuple(raw["save_at"])})


def main(figures: Callable[[pl.Trainer], dict[str, Any]] = lambda _: {}) -> None:
    """Train the runs of a file. ``figures`` returns what else is noted of a training."""
    for raw in json.loads(Path(sys.argv[1]).read_text()):
        run = parse(raw)
        module, trainer, recorder = train(run)
        out = Path(run.out)
        out.mkdir(parents=True, exist_ok=True)
        noted = {"losses": module.losses, "validated": module.validated, **recorder.extra, **figures(trainer)}
        (out / f"losses-{trainer.global_rank}.json").write_text(json.dumps(noted))
        if trainer.global_rank == 0:
            torch.save(recorder.masters, out / "masters.pt")


if __name__ == "__main__":
    main()

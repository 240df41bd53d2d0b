"""Compares what ``smart-infinity plan`` predicts with trainings of Llama-shaped models on this machine's CPU.

    python benchmarks/plan.py --sizes 124M 355M 1.1B 1.1B/nvme

Each size trains in a process of its own, bf16-mixed, with AdamW; "/nvme" puts its parameters on storage, and
"/nvme/100MB" does so with budgets of 100 MB for gradients and for parameters. Peaks of
resident memory (VmHWM, reset between the phases) are compared by phase, bytes on disk exactly, and the seconds of a
step, the median of three, with the plan after ``--measure``. With ``--rounds 3`` plans and trainings take turns, and
their medians are compared, since the rate of a disk changes. The largest of the sizes above takes 60 GB of disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from comparison import measure, report, write_figures
from machine import describe
from peak_memory import resident, restart_peak
from training import quiet_trainer

PHASES = ("building", "training", "saving")
WARMUP, MEASURED = 2, 3
BYTES = {"optimizer state": "state", "parameters": "parameters", "checkpoint being saved": "checkpoint"}


def budgets_of(size: str) -> dict[str, Any]:
    """Return the settings of ``transfer`` that a size such as "60M/nvme/100MB" asks for."""
    budget = size.split("/")[2:]
    return {name: nbytes for nbytes in budget for name in ("gradient_bytes", "parameter_bytes")}


def run(size: str, folder: Path, *, batch: int, seq: int) -> dict[str, Any]:
    """Train and save in this process; return peaks, bytes and seconds."""
    import deepspeed  # noqa: F401
    import lightning.pytorch as pl
    import transformers  # noqa: F401

    from lightning_smartinfinity import SmartInfinityStrategy
    from lightning_smartinfinity.planning.survey.models import find_source

    source, found = find_source(size.partition("/")[0]), {"imports": resident("VmRSS")}
    seconds: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            assert source.build is not None
            self.model = source.build()

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def train_dataloader(self) -> Any:
            tokens = torch.randint(0, 1000, ((WARMUP + MEASURED) * batch, seq))
            return torch.utils.data.DataLoader(tokens, batch_size=batch)

        def on_train_start(self) -> None:
            found["building"] = peak()

        def on_train_batch_end(self, *_: Any) -> None:
            seconds.append(time.perf_counter())

    zero = {"offload_param": {"device": "nvme"}} if "/nvme" in size else None
    transfer = {"dram_cache_bytes": 0, **budgets_of(size)}
    strategy = SmartInfinityStrategy(folder / "storage", overlap="forward", zero=zero, transfer=transfer)
    trainer = quiet_trainer(folder, strategy, max_steps=WARMUP + MEASURED)
    trainer.fit(Module())
    found["training"] = peak()
    trainer.save_checkpoint(folder / "a.ckpt")
    found["saving"] = peak()
    checkpoint = sum(file.stat().st_size for file in (folder / "a.ckpt").rglob("*") if file.is_file())
    shutil.rmtree(folder / "a.ckpt")
    steps = [after - before for before, after in pairwise(seconds)]
    return {
        **found,
        "seconds": statistics.median(steps[-MEASURED:]),
        "state": strategy.state_bytes,
        "parameters": strategy.parameter_bytes,
        "checkpoint": checkpoint,
        "host_bytes": strategy.host_bytes,
    }


def peak() -> int:
    """Return the highest resident memory since the last call, in bytes, and restart it at the present size."""
    highest = resident("VmHWM")
    restart_peak()
    return highest


def planned(size: str, folder: Path, *, batch: int, seq: int, measured: bool) -> dict[str, Any]:
    """Plan in this process, as the command does; return the same figures."""
    from lightning_smartinfinity.planning.choice import make_plan
    from lightning_smartinfinity.planning.needs import Place, held_by_update
    from lightning_smartinfinity.planning.pace import assumed_rates
    from lightning_smartinfinity.planning.survey.models import find_source, survey_model
    from lightning_smartinfinity.planning.survey.rates import measure_rates
    from lightning_smartinfinity.planning.survey.resources import survey_resources
    from lightning_smartinfinity.planning.training import Training
    from lightning_smartinfinity.settings import TransferConfig

    name, *offload = size.split("/")[:2]
    budgets = {
        key.replace("_bytes", "_budget"): getattr(TransferConfig(**budgets_of(size)), key) for key in budgets_of(size)
    }
    training = Training(batch=batch, seq=seq, offload_param=(*offload, "none")[0], **budgets)
    source, resources = find_source(name), survey_resources(folder)
    model = survey_model(source, batch=batch, seq=seq)
    rates = assumed_rates(on_gpu=False, cores=resources.cores)
    if measured:
        rates = measure_rates(source, model, training, rates, storage=folder, device="cpu")
    plan = make_plan(model, training, resources, rates)
    disk = next(need.owners for need in plan.needs if need.place is Place.DISK)
    assert plan.pace is not None
    return {
        **{need.phase: need.total for need in plan.needs if need.place is Place.HOST},
        **{key: disk.get(owner, 0) for owner, key in BYTES.items()},
        "owners": {need.phase: dict(need.owners) for need in plan.needs},
        "seconds": (plan.pace.step.low + plan.pace.step.high) / 2,
        "host_bytes": held_by_update(model, training),
    }


def medians(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the first turn with the median seconds of all turns."""
    seconds = {what: statistics.median(turn[what]["seconds"] for turn in turns) for what in turns[0]}
    return {what: {**turns[0][what], "seconds": seconds[what]} for what in turns[0]}


def rows(size: str, plan: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return the lines of the table about one size."""
    lines = []
    for name in (*PHASES, *BYTES.values(), "seconds"):
        unit, scale = ("s", 1.0) if name == "seconds" else ("GB", 1e9)
        share = plan[name] / run[name] if run[name] else 1.0
        cells = [size, f"{name}, {unit}", f"{plan[name] / scale:.3f}", f"{run[name] / scale:.3f}", f"{share:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Print the table below the machine.

    Returns:
        Exit status: 1 if a training failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["20M", "20M/nvme"], help='such as 124M or "1.1B/nvme"')
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--no-measure", action="store_true", help="compare seconds with the unmeasured plan")
    parser.add_argument("--storage", help="folder on the disk to measure; default: a temporary one here")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = {"batch": options.batch, "seq": options.seq}
    if options.child:
        what, size = options.child
        folder = Path(options.storage)
        report(
            run(size, folder, **shape)
            if what == "run"
            else planned(size, folder, **shape, measured=not options.no_measure)
        )
        return 0
    found: dict[str, Any] = {}
    more = ["--batch", str(options.batch), "--seq", str(options.seq), *["--no-measure"] * options.no_measure]
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.storage or ".") as folder:
            child = [__file__, *more, "--storage", folder]
            turns = [
                {what: measure(f"{size}, {what}", *child, "--child", what, size) for what in ("plan", "run")}
                for _ in range(options.rounds)
            ]
        found[size] = None if any(None in turn.values() for turn in turns) else medians(turns)
    print(describe("torch", "deepspeed", "transformers"))
    print(f"Llama-shaped, bf16-mixed, {options.batch} x {options.seq} tokens\n")
    print("| size | figure | plan | measured | plan / measured |\n|---|---|---|---|---|")
    for size, both in found.items():
        if both is not None:
            print("\n".join(rows(size, both["plan"], both["run"])))
    write_figures(options.json, **found)
    return int(None in found.values())


if __name__ == "__main__":
    sys.exit(main())

"""Compares the state formats: their cost and their effect on training.

The first table describes the update alone: bytes per parameter, the speed of one core (verification, update, rounding
and checksums of tasklets that fit the second-level cache, read from the page cache), and a whole step through the
pipeline in a folder. The table of state in memory has updates that move nothing to storage, by one thread and by
several, beside threads that copy memory. The next trains a small model on text, with every format from the same seeds,
and shows the loss on held-out text at the end. The last does so with every dtype in which gradients of several
micro-batches are added.
Usage::

    python benchmarks/formats.py [--folder .] [--million 400] [--steps 300] [--seeds 3] [--json figures.json]
    python benchmarks/formats.py --tables accumulation
    python benchmarks/formats.py --tables memory --million 100 --threads 1 2
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from comparison import write_figures
from machine import describe
from stepped_state import SteppedState
from training import quiet_trainer

from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings import TransferConfig

TABLES = ("updates", "memory", "losses", "accumulation")
_BATCH = 8  # sequences of a step, if it has no more micro-batches than that


@contextmanager
def updating(
    folder: Path, numel: int, state_format: str, transfer: TransferConfig, *, in_memory: bool = False
) -> Iterator[SteppedState]:
    """Yield a state, and remove its files afterwards."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="formats-") as inside:
        state = SteppedState([Path(inside)], [numel], state_format=state_format, transfer=transfer, in_memory=in_memory)
        try:
            yield state
        finally:
            state.close()


def updates(folder: Path, million: int, repeats: int, *, tiny: bool) -> list[dict[str, Any]]:
    """Measure the update with every format."""
    small = TransferConfig(tasklet_bytes=(64 if tiny else 256) << 10, num_buffers=2, direct_io="off")
    found = []
    for name in STATE_FORMATS:
        with updating(folder, (1 if tiny else 8) << 20, name, small) as update:
            compute = min(update.step()["compute"] for _ in range(repeats)) / update.numel
        with updating(folder, million * 10**6, name, TransferConfig()) as update:
            steps = [update.step() for _ in range(repeats)][-max(1, repeats - 1) :]
        found.append(
            {
                "format": name,
                "read": steps[-1]["read"] / update.numel,
                "written": steps[-1]["written"] / update.numel,
                "compute_per_second": 1 / compute,
                "updates_per_second": million * 1e6 / statistics.median(step["seconds"] for step in steps),
            }
        )
    return found


def in_memory(folder: Path, million: int, repeats: int, threads: Sequence[int]) -> list[dict[str, Any]]:
    """Measure updates of state in memory, with every format and number of threads, in turn with copies of memory.

    A parameter takes its state, read and written, its gradient, read, and itself, written in bf16.
    """
    found = []
    for name in STATE_FORMATS:
        row: dict[str, Any] = {"format": name}
        for number in threads:
            transfer = TransferConfig(compute_threads=number)
            with updating(folder, million * 10**6, name, transfer, in_memory=True) as update:
                update.step()
                seconds, copied = [], []
                moved = 2 * update.handler.cache_bytes + 4 * update.numel
                for _ in range(repeats):
                    seconds.append(update.step()["seconds"])
                    copied.append(copy_gb_per_second(number, million))
            row[f"{number}"] = update.numel / statistics.median(seconds)
            row[f"{number} of copy"] = moved / 1e9 / statistics.median(seconds) / statistics.median(copied)
        found.append(row)
    return found


def copy_gb_per_second(threads: int, mib: int) -> float:
    """Return the bytes, in GB, that threads read and write per second while they copy memory."""
    arrays = [(np.ones(mib << 20, np.uint8), np.ones(mib << 20, np.uint8)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(lambda pair: np.copyto(*pair), arrays))
        return threads * 2 * (mib << 20) / 1e9 / (time.perf_counter() - began)


def losses(
    settings: Mapping[str, Mapping[str, Any]], size: str, steps: int, seeds: int, *, accumulate: int = 1
) -> list[dict[str, Any]]:
    """Return held-out losses at the end of training, one for each seed.

    Args:
        settings: Settings of the strategy, by the name of a row.
        size: Of the model.
        steps: Of a training.
        seeds: Number of trainings of each row.
        accumulate: Micro-batches of a step.
    """
    _quieten()
    found = []
    for name, how in settings.items():
        values = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory(prefix="formats-") as folder:
                values.append(_train(Path(folder), how, size, steps, seed, accumulate))
        found.append({"format": name, "losses": values})
    return found


def _train(folder: Path, how: Mapping[str, Any], size: str, steps: int, seed: int, accumulate: int) -> float:
    from byte_lm import ByteLM
    from lightning import seed_everything
    from text_folder import TextFolder

    from lightning_smartinfinity import SmartInfinityStrategy

    seed_everything(seed, verbose=False)
    trainer = quiet_trainer(
        folder,
        SmartInfinityStrategy(folder / "state", **how),
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        val_check_interval=steps * accumulate,
        max_epochs=-1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    model = ByteLM(size, block_size=64)
    data = TextFolder(None, pattern="*.py", block_size=64, batch_size=max(1, _BATCH // accumulate), seed=seed)
    trainer.fit(model, data)
    loss = float(trainer.callback_metrics["val_loss"])
    trainer.strategy.close()  # type: ignore[attr-defined]
    return loss


def _quieten() -> None:
    import lightning.pytorch  # noqa: F401  sets the levels at import, so it comes first

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def print_updates(rows: list[dict[str, Any]]) -> None:
    """Print a table in Markdown."""
    print("\n| format | read + written, B/parameter | one core, G parameters/s | whole step, M parameters/s |")
    print("|---|---|---|---|")
    for row in rows:
        moved = f"{row['read']:.2f} + {row['written']:.2f}"
        print(
            f"| {row['format']} | {moved} | {row['compute_per_second'] / 1e9:.2f} |"
            f" {row['updates_per_second'] / 1e6:.1f} |"
        )


def print_memory(rows: list[dict[str, Any]], threads: Sequence[int]) -> None:
    """Print a table in Markdown."""
    heads = [f"{number} threads, M parameters/s | of a copy" for number in threads]
    print(f"\n| state in memory | {' | '.join(heads)} | last by first |")
    print("|---|" + "---|" * (2 * len(threads) + 1))
    for row in rows:
        values = [f"{row[f'{number}'] / 1e6:.0f} | {row[f'{number} of copy']:.2f}" for number in threads]
        gain = row[f"{threads[-1]}"] / row[f"{threads[0]}"]
        print(f"| {row['format']} | {' | '.join(values)} | {gain:.2f} |")


def print_losses(rows: list[dict[str, Any]], head: str) -> None:
    """Print a table in Markdown, each row beside the first, which is that of fp32."""
    base = rows[0]["losses"]
    print(f"\n| {head} |" + "".join(f" seed {seed} |" for seed in range(len(base))) + " mean | mean less fp32's |")
    print("|---|" + "---|" * (len(base) + 2))
    for row in rows:
        gaps = [value - other for value, other in zip(row["losses"], base, strict=True)]
        values = "".join(f" {value:.4f} |" for value in row["losses"])
        print(f"| {row['format']} |{values} {statistics.mean(row['losses']):.4f} | {statistics.mean(gaps):+.4f} |")


def main() -> None:
    """Print the machine and both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where state lies meanwhile")
    parser.add_argument("--million", type=int, default=200, help="parameters of the whole step, in millions")
    parser.add_argument("--repeats", type=int, default=6, help="updates; the first of a whole step does not count")
    parser.add_argument("--size", default="tiny", help="of the model that is trained, as in examples/byte_lm.py")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of updates of state in memory")
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--accumulate", type=int, nargs="*", default=[8, 32], help="micro-batches of a step")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="as small as it gets, to see that it works")
    options = parser.parse_args()
    if options.tiny:
        options.million, options.repeats, options.size, options.steps, options.seeds = 1, 1, "nano", 2, 1
        options.accumulate = [2]
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    print(describe("torch", "lightning", "deepspeed"))
    figures: dict[str, Any] = {"machine": describe("torch", "lightning", "deepspeed")}
    if "updates" in options.tables:
        figures["updates"] = updates(options.folder, options.million, options.repeats, tiny=options.tiny)
        print_updates(figures["updates"])
    common: dict[str, Any] = {"size": options.size, "steps": options.steps, "seeds": options.seeds}
    if "memory" in options.tables:
        figures["memory"] = in_memory(options.folder, options.million, options.repeats, options.threads)
        print_memory(figures["memory"], options.threads)
    if "losses" in options.tables:
        figures["losses"] = losses({name: {"state_format": name} for name in STATE_FORMATS}, **common)
        print_losses(figures["losses"], "format")
    if "accumulation" in options.tables:
        added = {name: {"transfer": {"accumulate_in": name}} for name in ("fp32", "parameters")}
        for number in options.accumulate:
            rows = figures[f"losses, {number} micro-batches"] = losses(added, **common, accumulate=number)
            print_losses(rows, f"{number} micro-batches, added in")
    write_figures(options.json, **figures)


if __name__ == "__main__":
    main()

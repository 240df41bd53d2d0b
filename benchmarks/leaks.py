"""Memory that stays after each save, fit, validation, export and strategy, beside plain Lightning.

    python benchmarks/leaks.py --actions save fit --rounds 300

Each action is repeated by one process, with a model of 88 tensors. After each round the benchmark collects garbage and
returns freed memory to the system, and measures four figures: anonymous memory (RssAnon), the bytes that glibc's malloc
has given out, the blocks that Python has allocated, and the objects that its garbage collector tracks. It prints their
slopes over the last two thirds of the rounds: the median over pairs of rounds that are a third apart, which one late
allocation of a library does not change. ``--top yes`` also prints where the blocks were allocated, and takes several
times as long.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import os
import statistics
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from comparison import Figures, compare, in_child, parse_options, several
from machine import describe
from peak_memory import resident

COLUMNS = {  # key of the figures and number of digits
    "anonymous memory, B/round": ("anonymous", 0),
    "allocated by malloc, B/round": ("allocated", 0),
    "blocks/round": ("blocks", 2),
    "objects/round": ("objects", 2),
    "anonymous memory at the end, MB": ("last_mb", 0),
}
TOP = 15


class Allocations(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Rounds:
    """Measures this process's memory after each round.

    Args:
        count: Number of rounds.
        top: Whether to print where the memory of the last two thirds was allocated.
    """

    def __init__(self, count: int, *, top: bool) -> None:
        self.count, self._top = count, top
        self._samples: list[tuple[int, int, int, int]] = []
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
        self._info: Any = getattr(ctypes.CDLL(None), "mallinfo2", Allocations)
        self._info.restype = Allocations
        self._before: tracemalloc.Snapshot | None = None

    @property
    def done(self) -> bool:
        """Whether all rounds have ended."""
        return len(self._samples) >= self.count

    def end(self, *_: object) -> None:
        """Measure at the end of a round."""
        if not self._samples:
            gc.collect()
            gc.freeze()  # later collections and counts leave out the libraries
            if self._top:
                tracemalloc.start(12)
        gc.collect()
        self._trim(0)
        info = self._info()
        allocated = info.uordblks + info.hblkhd
        self._samples.append((resident("RssAnon"), allocated, sys.getallocatedblocks(), len(gc.get_objects())))
        if self._top and len(self._samples) == self.count // 3:
            self._before = tracemalloc.take_snapshot()

    def figures(self) -> Figures:
        """Return the slopes."""
        if self._before is not None:
            for line in tracemalloc.take_snapshot().compare_to(self._before, "traceback")[:TOP]:
                print(f"{line.size_diff} B in {line.count_diff}", *line.traceback.format(), sep="\n", file=sys.stderr)
        apart = self.count // 3
        slopes = []
        for values in zip(*self._samples, strict=True):
            measured = values[apart:]
            pairs = zip(measured, measured[apart:], strict=False)
            slopes.append(statistics.median((after - before) / apart for before, after in pairs))
        figures = dict(zip(("anonymous", "allocated", "blocks", "objects"), slopes, strict=True))
        return {**figures, "last_mb": self._samples[-1][0] / 1e6}


def model_of() -> Any:
    """Return a small model of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=7, n_head=2))


def module_of(*, checkpointing: bool = False) -> Any:
    """Return a module of Lightning around the model, with activation checkpointing if asked for."""
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()
            if checkpointing:
                self.model.gradient_checkpointing_enable()

        def training_step(self, batch: torch.Tensor) -> Any:
            return self.model(batch, labels=batch).loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("loss", self.model(batch, labels=batch).loss)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(80_000).view(-1, 8) % 64, batch_size=2)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return DataLoader(torch.arange(16).view(-1, 8), batch_size=2)  # type: ignore[arg-type]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Module()


def trainer_of(folder: Path, *, plain: bool, **settings: Any) -> Any:
    """Return a Trainer that prints nothing, with this package's strategy or Lightning's own."""
    import lightning.pytorch as pl

    from lightning_smartinfinity import SmartInfinityStrategy

    return pl.Trainer(
        strategy="auto" if plain else SmartInfinityStrategy(folder / "storage"),
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if plain else "bf16-true",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "limit_val_batches": 0, **settings},
    )


def steps(rounds: Rounds, folder: Path, *, plain: bool, action: str) -> None:
    """Take one step in each round, and save, validate or export after it."""
    from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

    class Background(ModelCheckpoint):
        """Saves after each step, beside the training."""

    def end(trainer: Any, *_: object) -> None:
        if action == "save":
            trainer.save_checkpoint(folder / "a.ckpt")
        elif action == "export":
            trainer.strategy.save_pretrained(folder / f"live-{trainer.global_step}")
        for thread in threading.enumerate():
            if thread.name == "smart-infinity-save":  # what a save in progress holds is no leak
                thread.join()
        rounds.end()

    callbacks: list[Any] = [LambdaCallback(on_train_batch_end=end)]
    settings: dict[str, Any] = {}
    if action == "callback":
        callbacks.append(Background(folder, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max"))
        settings["enable_checkpointing"] = True
    if action == "validate":
        settings |= {"limit_val_batches": 1, "val_check_interval": 1, "num_sanity_val_steps": 0}
    trainer = trainer_of(folder, plain=plain, max_steps=rounds.count, callbacks=callbacks, **settings)
    trainer.fit(module_of())


def evaluations(rounds: Rounds, folder: Path, *, plain: bool) -> None:
    """Evaluate by one Trainer in each round."""
    trainer, module = trainer_of(folder, plain=plain, limit_val_batches=1), module_of()
    while not rounds.done:
        trainer.validate(module, verbose=False)
        rounds.end()


def fits(rounds: Rounds, folder: Path, *, plain: bool, resume: bool = False, checkpointing: bool = False) -> None:
    """Train three steps by a new Trainer in each round, from the last checkpoint if ``resume``.

    After two steps DeepSpeed knows the order of modules, and remembers more.
    """
    path = folder / "a.ckpt"
    while not rounds.done:
        done = len(rounds._samples)
        trainer = trainer_of(folder, plain=plain, max_steps=3 * (done + 1) if resume else 3)
        module = module_of(checkpointing=checkpointing)
        trainer.fit(module, ckpt_path=path if resume and done else None, weights_only=False)
        if resume:
            trainer.save_checkpoint(path)
        if not plain:
            trainer.strategy.close()
        del trainer, module
        rounds.end()


def transformers_fits(rounds: Rounds, folder: Path, *, plain: bool) -> None:
    """Train three steps by a new Trainer of transformers in each round."""
    import torch
    from transformers import Trainer, TrainingArguments

    from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining

    rows = [{"input_ids": row, "labels": row} for row in torch.arange(48).view(-1, 8)]
    settings: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings |= {"report_to": [], "disable_tqdm": True}
    while not rounds.done:
        with nullcontext() if plain else SmartInfinityTraining(folder / "storage") as training:
            device = {"use_cpu": True} if training is None else {"deepspeed": training.config}
            trainer = Trainer(model_of(), TrainingArguments(str(folder), **settings, **device), train_dataset=rows)
            trainer.train()
        del training, device, trainer
        rounds.end()


def exports(rounds: Rounds, folder: Path, *, plain: bool, to: str) -> None:
    """Export one checkpoint in each round."""
    from lightning_smartinfinity.cli.main import main as command

    trainer = trainer_of(folder, plain=plain, max_steps=1)
    trainer.fit(module_of())
    trainer.save_checkpoint(folder / "a.ckpt")
    trainer.strategy.close()
    del trainer
    while not rounds.done:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()) as told:
            status = command([*["export", "--to"], to, str(folder / "a.ckpt"), str(folder / f"{len(rounds._samples)}")])
        assert status == 0, told.getvalue()
        rounds.end()


def strategies(rounds: Rounds, folder: Path, *, plain: bool) -> None:
    """Set up a strategy of Fabric, take three steps, and close it in each round."""
    import torch
    from lightning.fabric import Fabric

    from lightning_smartinfinity import SmartInfinityFabricStrategy

    while not rounds.done:
        strategy: Any = "auto" if plain else SmartInfinityFabricStrategy(folder / "storage")
        fabric = Fabric(
            accelerator="cpu", devices=1, strategy=strategy, precision="bf16-mixed" if plain else "bf16-true"
        )
        fabric.launch()
        model: Any = model_of()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        batch = torch.arange(8).view(1, 8)
        for _ in range(3):  # as for fits
            fabric.backward(model(batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if not plain:
            strategy.close()
        del fabric, strategy, model, optimizer
        rounds.end()


ACTIONS: dict[str, Callable[..., None]] = {
    "step": partial(steps, action="step"),
    "save": partial(steps, action="save"),
    "callback": partial(steps, action="callback"),
    "validate": partial(steps, action="validate"),
    "evaluate": evaluations,
    "fit": fits,
    "resume": partial(fits, resume=True),
    "checkpointing": partial(fits, checkpointing=True),
    "transformers": transformers_fits,
    "live_export": partial(steps, action="export"),
    "export": partial(exports, to="safetensors"),
    "export_file": partial(exports, to="lightning"),
    "strategy": strategies,
}
OURS_ONLY = ("live_export", "export", "export_file")


def run(options: argparse.Namespace) -> Figures:
    """Repeat an action in this process."""
    action, _, system = options.child.partition(", ")
    rounds = Rounds(options.rounds_each, top=options.top == "yes")
    ACTIONS[action](rounds, Path(options.storage), plain=system != "this package")
    return rounds.figures()


def rows(options: argparse.Namespace) -> Iterator[tuple[str, Figures | None]]:
    """Yield the figures of each action, by this package and by plain Lightning."""
    for action in options.actions:
        plain = "transformers" if action == "transformers" else "Lightning"
        for system in ("this package", plain)[: 1 if action in OURS_ONLY else 2]:
            name = f"{action}, {system}"
            yield name, in_child(__file__, options, name)


def main() -> int:
    """Measure each action and print a table below the machine.

    Returns:
        Exit status: 1 if an action failed.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    # torch remembers the last 2000 collectives of a process, of 0.6 KB each. A round has few: fill the memory early.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    options = parse_options(
        __doc__,
        actions=several([*ACTIONS]),
        rounds_each={"type": int, "default": 300, "help": "repetitions of each action"},
        top={"choices": ("yes", "no"), "default": "no", "help": "print where Python's memory was allocated"},
        size={"default": "tiny"},
        tokens=None,
        steps=None,
    )
    return compare(
        __file__,
        options,
        run=run,
        columns=COLUMNS,
        machine=partial(describe, "torch", "deepspeed", "lightning"),
        heading=f"88 tensors, {options.rounds_each} rounds, slopes over the last two thirds",
        rows=lambda: dict(rows(options)),
    )


if __name__ == "__main__":
    sys.exit(main())

"""Gradients beyond ``gradient_bytes`` lie on storage, or binding updates give them up; no bit changes."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_smartinfinity import (
    ConfigError,
    SmartInfinityStrategy,
    StorageCorruptError,
    TopK,
    UnsupportedError,
    native,
)
from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.pipeline.layout.free_memory import MemoryLimit, MemoryReport
from lightning_smartinfinity.pipeline.step import Step
from lightning_smartinfinity.storage.records.residual_file import residual_bytes
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.setup import open_storage as storage
from lightning_smartinfinity.zero3.setup import state_in_memory
from tests.helpers.assertions import assert_equal
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.actions import Action, does, halve_gradients, halve_rate, save
from tests.training.test_overlap import BF16, BUCKET, NVME, SMALL_RING, assert_holds, assert_same, interrupt_at, result
from tests.training.worker import Run, each_rank, launch, prepared, train

PLAIN = Recipe(precision="bf16-true", depth=2, width=48, max_steps=6)
BUDGET = 48 << 10


def run_of(root: Path, recipe: Recipe, overlap: str, *, budget: int | None = None, **options: Any) -> Run:
    options["zero"] = {**BUCKET, **options.get("zero", {})}
    budgets = {} if budget is None else {"gradient_bytes": budget}
    settings = {"delays": 1, "delay_us": 500, "devices": options.pop("devices", 1)}
    return Run(
        out=str(root),
        recipe=recipe,
        transfer={**SMALL_RING, **budgets, **options.pop("transfer", {})},
        options={**options, "overlap": overlap},
        **settings,
    )


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[GradientWindows]:
    """Every memory with a budget that a training of this test makes."""
    made: list[GradientWindows] = []

    class Noted(GradientWindows):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.most = 0
            made.append(self)

        def hold(self, *args: Any, **settings: Any) -> None:
            super().hold(*args, **settings)
            self.most = max(self.most, self.memory_bytes)

    monkeypatch.setattr("lightning_smartinfinity.zero3.optimizer.open_state.GradientWindows", Noted)
    return made


@pytest.mark.parametrize(
    ("what", "budget"),
    [
        pytest.param({}, 2 * BUDGET, id="plain"),
        pytest.param({"skip_side_at": (4,), "nan_at": (6,), "max_steps": 8}, 4 * BUDGET, id="unused, then an overflow"),
        pytest.param({"accumulate": 2}, 4 * BUDGET, id="accumulation"),
    ],
)
def test_gradients_that_are_given_up(what: dict[str, Any], budget: int, tmp_path: Path, memories: list[Any]) -> None:
    """Where nothing but the step can follow backward, gradients are given up, and no bit changes."""
    recipe, written = dataclasses.replace(PLAIN, depth=4, **what), []

    def note(trainer: pl.Trainer, module: Any) -> None:
        written.append(trainer.strategy.optimizers[0].rank_state.arena.counters().written_bytes)

    straight = result(run_of(tmp_path / "straight", recipe, "none"))
    module, trainer, recorder = train(
        run_of(tmp_path / "budget", recipe, "backward", budget=budget), does(on_train_batch_end=note)
    )
    speculation = trainer.strategy.optimizers[0].speculation
    assert speculation.num_binding > 2
    if not what:  # none goes to storage but in the first two steps, which are watched
        assert (
            speculation.num_binding == PLAIN.max_steps - 2
            and written[1] > memories[0].tensor.nbytes
            and written[2:] == [written[2]] * 4
        )
    assert_same(((module.losses, module.validated, recorder.extra), recorder.masters), straight)


def trained_between(root: Path, action: Action, overlap: str, budget: int | None) -> Any:
    """Train with something that happens between the last backward of the fourth and the sixth step and the step."""

    def act(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step in (3, 5):
            action(trainer, module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return result(run_of(root, PLAIN, overlap, budget=budget), does(on_before_optimizer_step=act))


def change(trainer: pl.Trainer, module: Any) -> None:
    """Halve the gradients of one step, and from the next one on the learning rate."""
    (halve_gradients if trainer.global_step == 3 else halve_rate)(trainer, module)


def test_what_comes_between_backward_and_step(tmp_path: Path) -> None:
    """A callback that reads and writes gradients, or changes the learning rate, finds all gradients."""
    straight = trained_between(tmp_path / "straight", change, "none", None)
    assert_same(trained_between(tmp_path / "budget", change, "backward", BUDGET), straight)


@pytest.mark.parametrize(
    ("action", "match"),
    [(halve_rate, r"lr was .* and is .* after its update had begun"), (halve_gradients, r"given (it |them )?up")],
)
def test_what_is_used_or_changed_in_spite_of_the_promise(
    action: Action, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If gradients were given up already, the error names what was changed, and no rank takes the step."""
    monkeypatch.setattr("lightning_smartinfinity.integrations.trainer.strategy._may_change_steps", lambda _: False)
    with pytest.raises(UnsupportedError, match=match):
        trained_between(tmp_path, action, "backward", BUDGET)


def test_auto_where_not_all_gradients_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the memory that is free holds gradients, the log says so, and no bit changes."""
    recipe = dataclasses.replace(PLAIN, depth=6)
    straight = result(run_of(tmp_path / "straight", recipe, "none"))
    assert not memories
    monkeypatch.setattr(storage, "measure_memory", memory_of(itertools.repeat(300_000)))
    with caplog.at_level(logging.INFO):
        assert_same(result(run_of(tmp_path / "auto", recipe, "forward")), straight)
    (memory,) = memories
    nbytes = memory.tensor.nbytes
    assert (
        nbytes > 300_000
        and memory.most <= memory.budget_bytes == 150_000
        and memory.counters().written_bytes > 0
        and f"gradient_bytes='auto': 150000 of {nbytes} bytes of gradients are held in memory" in caplog.text
    )


# ---- budgets that cannot be kept


def test_settings_that_cannot_be_kept(tmp_path: Path) -> None:
    """The error says how much is needed, which is enough; and compression reads all gradients after the step."""
    with pytest.raises(ConfigError, match=r"gradient_bytes=1000\) is too little .* needs (\d+) bytes") as caught:
        result(run_of(tmp_path / "little", PLAIN, "none", budget=1000))
    least = int(str(caught.value).split(" needs ")[1].split()[0])
    result(run_of(tmp_path / "least", dataclasses.replace(PLAIN, max_steps=1), "none", budget=least))
    with pytest.raises(ConfigError, match=r"gradient_bytes=.* compression=TopK.* reads all gradients again"):
        result(run_of(tmp_path / "compressed", PLAIN, "none", budget=BUDGET, compression=TopK(0.1)))


class WithFrozen(LitTiny):
    """A module that optimizes all its parameters, and has a frozen layer that is larger than all others together."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.large = torch.nn.Linear(512, 512).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_space_is_asked_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs room does before anything is written: state, gradients, parameters, activations, residuals.

    Frozen parameters need none for state.
    """
    asked: list[dict[str, int]] = []
    original = storage.require_space

    def note(requests: Any) -> None:
        asked[-1] = asked[-1] or {each.what: each.needed_bytes for each in requests}
        original(requests)

    monkeypatch.setattr(storage, "require_space", note)
    taken = []
    for name, module_class in (("plain", LitTiny), ("frozen", WithFrozen)):
        asked.append({})
        transfer = {**SMALL_RING, "gradient_bytes": 2 * BUDGET}
        activations = {"storage_bytes": 1 << 20}
        strategy = SmartInfinityStrategy(tmp_path / name, zero=NVME, transfer=transfer, activations=activations)
        trainer = quiet_trainer(tmp_path, strategy, precision="bf16-true", max_steps=1)
        trainer.fit(module_class(dataclasses.replace(PLAIN, depth=4)))
        taken.append((strategy.state_bytes, strategy.state_numel, strategy.host_bytes["gradient_arena"]))
        assert asked[-1].pop("parameters") >= strategy.parameter_bytes > 0
        strategy.close()
    assert (
        {"optimizer state", "gradients that are not held in memory", "activations"} == asked[0].keys()
        and asked[0] == asked[1]
        and taken[0] == taken[1]
    )
    asked.append({})
    strategy = SmartInfinityStrategy(tmp_path / "compressed", compression=TopK(0.1), transfer=SMALL_RING)
    quiet_trainer(tmp_path, strategy, max_steps=1).fit(LitTiny(PLAIN))
    assert max(asked[-1].values()) == asked[-1]["optimizer state"] > min(asked[-1].values())
    assert asked[-1]["residuals of compressed gradients"] == residual_bytes(strategy.state_numel)


# ---- storage that fails


def spoil_gradients(trainer: pl.Trainer, module: Any) -> None:
    """Flip a bit in every gradient on storage; their file has no name."""
    memory = trainer.optimizers[0].rank_state.arena._memory
    for window in memory._stored:
        extent = memory._places[window].extent
        for link in Path("/proc/self/fd").iterdir():
            if link.is_symlink() and "(deleted)" in str(link.readlink()) and link.stat().st_size > extent.offset:
                with link.open("r+b", buffering=0) as file:
                    file.seek(extent.offset + 5)
                    (byte,) = file.read(1)
                    file.seek(extent.offset + 5)
                    file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("overlap", "action"),
    [
        # The squares of gradients that were changed are not known, so that they are read for the norm.
        ("none", lambda *what: (halve_gradients(*what), spoil_gradients(*what))),
        ("forward", spoil_gradients),
    ],
)
def test_a_gradient_that_storage_changed(overlap: str, action: Action, tmp_path: Path, attack: Attack) -> None:
    """Norm and update verify what they read: the step is not taken, and the training ends with an error."""
    attack("a flipped bit in gradients on storage", tries=1, outcome="StorageCorruptError with path and offset")
    with pytest.raises(StorageCorruptError, match=r"^Gradients: the block at offset \d+ of .* does not hold"):
        trained_between(tmp_path, action, overlap, BUDGET)


# ---- what may come between a binding update's first gradient and its step

BOUND = dataclasses.replace(PLAIN, depth=4, max_steps=8)
BINDING = {"overlap": "backward", "budget": 2 * BUDGET}


def test_a_gradient_of_another_rank_is_not_finite(tmp_path: Path) -> None:
    """Both ranks skip the step, though they have given gradients up, and go on with the bits of a run without overlap.

    Two more updates have to be kept before the next one is binding.
    """
    recipe = dataclasses.replace(BOUND, nan_at=(4,), nan_rank=1)
    runs = [
        run_of(tmp_path / "straight", recipe, "none", devices=2),
        run_of(tmp_path / "binding", recipe, **BINDING, devices=2),
    ]
    straight, binding = launch(*runs, worker="tests.training.guesses_worker")
    counted = [binding.extra.pop(name) for name in ("adopted", "binding", "discarded", "counts")]
    assert (counted[:3], binding.extra["skipped"]) == ([7, 3, 1], [4])
    expected = {name: straight.extra[name] for name in binding.extra}
    assert_same(((binding.losses, binding.extra), binding.masters), ((straight.losses, expected), straight.masters))


# ---- Ctrl-C

INTERRUPTED = {
    "the update begins": (TransferHandler, "begin_incremental"),
    "a tasklet is opened": (Step, "extend"),
    "a gradient has come": (Speculation, "arrived"),
    "the update is completed": (Step, "complete"),
    "the step adopts the update": (Speculation, "adopt"),
}


@pytest.mark.parametrize(
    ("name", "after"),
    long_but(
        [("a gradient has come", True), ("the step adopts the update", True)],
        itertools.product(INTERRUPTED, [False, True]),
    ),
)
def test_an_interrupt(name: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is rolled back: the last step is kept and can be saved, and what resumes has the bits of all steps."""
    run = run_of(tmp_path / "interrupted", BOUND, **BINDING)
    module, trainer, _ = prepared(run, interrupt_at(monkeypatch, INTERRUPTED[name], after=after))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module)
    optimizer: Any = trainer.strategy.optimizers[0]
    assert optimizer.speculation._binds and optimizer.update.drained_handler().generation == 2
    save(trainer, module)
    two_steps = dataclasses.replace(BOUND, max_steps=2)
    assert_holds(trainer, module, result(run_of(tmp_path / "straight", two_steps, "none"))[1])
    saved = str(Path(trainer.default_root_dir) / "saved.ckpt")
    (losses, _, extra), masters = result(dataclasses.replace(run, out=str(tmp_path / "resumed"), resume=saved))
    (expected, _, of_all), of_straight = result(run_of(tmp_path / "all", BOUND, "none"))
    assert (losses, extra["steps"]) == (expected[2:], of_all["steps"])
    assert_equal(masters, of_straight)


# That an error of one rank reaches all of them is in test_failures.py.
@pytest.mark.parametrize("ranks", long_but([1], [1, 2]))
def test_a_weight_that_is_used_once_more(ranks: int, tmp_path: Path) -> None:
    """All ranks raise an error that names it, and its state is that of the step before."""
    for outcome in each_rank("used_again", tmp_path, ranks, ranks=ranks):
        assert "parameter 'model.blocks.3.block.norm1.weight' was used or changed after its update" in outcome["error"]
        assert outcome["binding"] == 2 and outcome["generation"] == 4 and outcome["differ"] == []


def memory_of(available: Iterator[int], *asked: list[int]) -> Any:
    """Return a fake measurement of a machine with these free bytes; lists get what is to be reserved."""

    def measure(*, reserved: int) -> MemoryReport:
        for each in asked:
            each.append(reserved)
        return MemoryReport(machine=machine_identity(), limits={"machine": MemoryLimit(0, next(available))}, reserved=0)

    return measure


@pytest.mark.parametrize(
    ("durability", "budget", "activations"),
    [("step", {}, None), ("none", {"gradient_bytes": 200_000}, {"host_bytes": 10**7})],
)
def test_what_is_free_becomes_a_cache(
    durability: str,
    budget: dict[str, int],
    activations: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With "auto" the cache holds as many whole tasklets as fit into free memory; strategy and log report it once.

    What the training has still to allocate is reserved.
    """
    asked: list[int] = []
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(state_in_memory, "measure_memory", memory_of(itertools.repeat(100_000), asked))
    ring = {"tasklet_bytes": SMALL_RING["tasklet_bytes"], "compute_threads": 3}
    transfer = {**ring, "dram_cache_bytes": "auto", "durability": durability, **budget}
    options = {"overlap": "none", "activations": activations}
    _, trainer, _ = train(Run(out=str(tmp_path), recipe=BF16, transfer=transfer, options=options))
    strategy: Any = trainer.strategy
    cached, traffic = strategy.host_bytes["dram_cache"], strategy.traffic()
    assert (
        100_000 - SMALL_RING["tasklet_bytes"] < cached <= 100_000
        and traffic.cached_read_bytes > 0
        and (traffic.cached_write_bytes > 0) == (durability == "none")
    )
    assert caplog.text.count("stay in host memory; the limit is 0.00 GiB: its share of what is free") == 1
    assert "num_buffers='auto': 18 buffers of" in caplog.text  # 16 for the drive, and one for each other thread
    gradients = strategy.host_bytes["gradient_arena"] if durability == "step" else 200_000
    assert asked[0] == pytest.approx(
        2 * 18 * ring["tasklet_bytes"] + gradients + (0 if activations is None else 10**7), rel=0.02
    )


@pytest.mark.parametrize(
    ("wanted", "measured", "given", "reason"),
    [
        ("auto", [10**6, 0, -1], 9, "other processes have taken memory meanwhile"),
        ("auto", 9 * [10**6], 1, "the system refuses more (Cannot allocate memory)"),
        (10**6, [], 1, "the system refuses so much: Cannot allocate memory. Pass less"),
    ],
)
def test_memory_that_is_not_there(
    wanted: int | str,
    measured: list[int],
    given: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By default less state is in memory, and the log says why; a size of the user's is refused."""
    caplog.set_level(logging.INFO)
    pieces = iter(range(given))

    def allocate(nbytes: int) -> native.HostBuffer:
        if next(pieces, None) is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return native.HostBuffer(nbytes)

    monkeypatch.setattr(state_in_memory, "native", SimpleNamespace(HostBuffer=allocate))
    monkeypatch.setattr(state_in_memory, "measure_memory", memory_of(iter(measured)))
    monkeypatch.setattr(state_in_memory, "_LEAST_PIECE", 1)
    run = Run(out=str(tmp_path), recipe=BF16, transfer={**SMALL_RING, "dram_cache_bytes": wanted}, options={})
    if wanted != "auto":
        with pytest.raises(ConfigError, match=rf"\(dram_cache_bytes={wanted}\).* {reason}"):
            train(run)
        return
    _, trainer, _ = train(run)
    strategy: Any = trainer.strategy
    assert 0 < strategy.host_bytes["dram_cache"] <= SMALL_RING["tasklet_bytes"]
    assert f"stay in host memory; the limit is 0.00 GiB: {reason}" in caplog.text

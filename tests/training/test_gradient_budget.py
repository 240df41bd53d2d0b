"""Gradients beyond ``gradient_bytes`` lie on storage, or are given up as they are used; no bit changes."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

from lightning_smartinfinity import (
    ConfigError,
    SmartInfinityStrategy,
    StorageCorruptError,
    StorageFullError,
    UnsupportedError,
)
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.storage.state import space
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore
from lightning_smartinfinity.zero3.setup import open_storage as storage
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.test_dram_cache import memory_of
from tests.training.test_overlap import CASES, SMALL_RING, assert_same, result
from tests.training.worker import Run, launch, train

# Gradients leave during backward, about one layer at a time.
BUCKET = {"reduce_bucket_size": 4000}
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
    ("name", "overlap"),
    long_but(
        [("32-true", "none"), ("bf16-mixed", "backward")],
        itertools.product(CASES, ["none", "forward", "backward"]),
    ),
)
def test_same_bits(name: str, overlap: str, tmp_path: Path, memories: list[Any]) -> None:
    """Accumulation, clipping, skipped steps, unused, frozen and offloaded parameters: as with all in memory."""
    recipe, options = dataclasses.replace(CASES[name][0], width=64, depth=2), CASES[name][1]
    straight = result(run_of(tmp_path / "straight", recipe, "none", **options))
    assert not memories
    assert_same(result(run_of(tmp_path / "budget", recipe, overlap, budget=4 * BUDGET, **options)), straight)
    (memory,) = memories  # otherwise all gradients fit into the budget
    assert memory.counters().written_bytes > 0
    assert memory.most <= memory.budget_bytes


def test_two_processes(tmp_path: Path) -> None:
    """Each rank has a budget of its own, and a step that one rank skips is skipped by both."""
    recipe = dataclasses.replace(CASES["bf16-mixed"][0], validate=False, nan_rank=1, width=64)
    runs = [
        run_of(tmp_path / overlap, recipe, overlap, budget=budget, devices=2)
        for overlap, budget in (("none", None), ("backward", 2 * BUDGET))
    ]
    expected, outcome = launch(*runs)
    assert_same(
        (repr((outcome.losses, outcome.extra)), outcome.masters),
        (repr((expected.losses, expected.extra)), expected.masters),
    )


class Written(pl.Callback):
    """Notes how many bytes of gradients have been written to storage after each step."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.after.append(trainer.optimizers[0].rank_state.arena.counters().written_bytes)  # type: ignore[attr-defined]


def test_gradients_that_are_given_up(tmp_path: Path, memories: list[Any]) -> None:
    """Where nothing but the step can follow backward, gradients are given up, and none goes to storage."""
    recipe, written = dataclasses.replace(PLAIN, depth=4), Written()
    straight = result(run_of(tmp_path / "straight", recipe, "none"))
    module, trainer, recorder = train(run_of(tmp_path / "budget", recipe, "backward", budget=2 * BUDGET), written)
    speculation = trainer.strategy.optimizers[0].speculation
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert speculation.num_binding == PLAIN.max_steps - 2, "all but the first two, which are watched"
    assert written.after[1] > memories[0].tensor.nbytes and written.after[2:] == [written.after[2]] * 4
    assert_same(((module.losses, module.validated, recorder.extra), recorder.masters), straight)


class Between(pl.Callback):
    """Does something between the last backward of some steps and the step."""

    def __init__(self, action: Callable[[pl.Trainer, Any], None], steps: tuple[int, ...]) -> None:
        self._action, self._steps = action, steps

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in self._steps:
            self._action(trainer, pl_module)


def halve(trainer: pl.Trainer, module: Any) -> None:
    for param in module.parameters():
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, 0.5 * gradient)


def look(trainer: pl.Trainer, module: Any) -> None:
    for param in module.parameters():
        safe_get_full_grad(param)


def slow_down(trainer: pl.Trainer, module: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.5


def trained_between(root: Path, action: Callable[..., None], overlap: str, budget: int | None) -> Any:
    run = run_of(root, PLAIN, overlap, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, trainer, recorder = train(run, Between(action, steps=(3, 5)))
    trainer.strategy.close()  # type: ignore[attr-defined]
    return (module.losses, module.validated, recorder.extra), recorder.masters


@pytest.mark.parametrize("action", [halve, slow_down])
def test_what_comes_between_backward_and_step(action: Callable[..., None], tmp_path: Path) -> None:
    """A callback that reads and writes gradients, or changes the learning rate, finds all gradients."""
    straight = trained_between(tmp_path / "straight", action, "none", None)
    assert_same(trained_between(tmp_path / "budget", action, "backward", BUDGET), straight)


def test_a_learning_rate_that_changes_in_spite_of_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If gradients were given up already, the error names what was changed, and no rank takes the step."""
    monkeypatch.setattr("lightning_smartinfinity.integrations.trainer.strategy._may_change_steps", lambda _: False)
    with pytest.raises(UnsupportedError, match=r"lr was .* and is .* after its update had begun"):
        trained_between(tmp_path, slow_down, "backward", BUDGET)


@pytest.mark.parametrize("action", [halve, look])
def test_a_gradient_that_is_used_in_spite_of_the_promise(
    action: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises at the step, instead of training on after zeros were handed out."""
    monkeypatch.setattr("lightning_smartinfinity.integrations.trainer.strategy._may_change_steps", lambda _: False)
    with pytest.raises(UnsupportedError, match=r"given (it |them )?up"):
        trained_between(tmp_path, action, "backward", BUDGET)


def test_auto_where_not_all_gradients_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memories: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the memory that is free holds gradients, the log says so, and no bit changes."""
    recipe = dataclasses.replace(PLAIN, depth=6)
    straight = result(run_of(tmp_path / "straight", recipe, "none"))
    assert not memories
    monkeypatch.setattr(storage, "measure_memory", memory_of(300_000))
    with caplog.at_level(logging.INFO):
        assert_same(result(run_of(tmp_path / "auto", recipe, "forward")), straight)
    (memory,) = memories
    nbytes = memory.tensor.nbytes
    assert nbytes > 300_000 and memory.most <= memory.budget_bytes == 150_000
    assert memory.counters().written_bytes > 0
    assert f"gradient_bytes='auto': 150000 of {nbytes} bytes of gradients are held in memory" in caplog.text


# ---- budgets that cannot be kept


def test_a_budget_below_the_largest_parameter(tmp_path: Path) -> None:
    """The error says how much is needed; so much is enough."""
    with pytest.raises(ConfigError, match=r"gradient_bytes=1000\) is too little .* needs (\d+) bytes") as caught:
        result(run_of(tmp_path / "little", PLAIN, "none", budget=1000))
    least = int(str(caught.value).split(" needs ")[1].split()[0])
    result(run_of(tmp_path / "least", dataclasses.replace(PLAIN, max_steps=1), "none", budget=least))


def test_compression_needs_all_gradients(tmp_path: Path) -> None:
    """The residual is computed from gradients after the step."""
    from lightning_smartinfinity import TopK

    with pytest.raises(ConfigError, match=r"gradient_bytes=.* compression=TopK.* reads all gradients again"):
        result(run_of(tmp_path, PLAIN, "none", budget=BUDGET, compression=TopK(0.1)))


def test_space_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has room for the state alone is refused before anything is trained."""
    request = space._request
    monkeypatch.setattr(
        space,
        "_request",
        lambda folder, *, needed_bytes, what="optimizer state", **rest: dataclasses.replace(
            request(folder, needed_bytes=needed_bytes, what=what, **rest),
            free_bytes=0 if what.startswith("gradients") else 1 << 40,
        ),
    )
    with pytest.raises(StorageFullError, match="gradients that are not held in memory"):
        result(run_of(tmp_path, PLAIN, "none", budget=BUDGET))
    assert not list(tmp_path.rglob("state.bin"))


# ---- storage that fails


def test_no_room_for_a_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step raises, and nothing is lost: what could not be spilled is still in memory."""

    def full(*_: Any, **__: Any) -> Any:
        raise StorageFullError("There is no room.", "Free some.")

    monkeypatch.setattr(TensorStore, "add", full)
    with pytest.raises(StorageFullError, match="There is no room"):
        result(run_of(tmp_path, PLAIN, "none", budget=BUDGET))


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


def halve_and_spoil(trainer: pl.Trainer, module: Any) -> None:
    """Spoil gradients of which the squares are not known, so that they are read for the norm."""
    halve(trainer, module)
    spoil_gradients(trainer, module)


@pytest.mark.parametrize(("overlap", "action"), [("none", halve_and_spoil), ("forward", spoil_gradients)])
def test_a_gradient_that_storage_changed(
    overlap: str, action: Callable[..., None], tmp_path: Path, attack: Attack
) -> None:
    """Norm and update verify what they read: the step is not taken, and the training ends with an error."""
    attack("a flipped bit in gradients on storage", tries=1, outcome="StorageCorruptError with path and offset")
    with pytest.raises(StorageCorruptError, match=r"^Gradients: the block at offset \d+ of .* does not hold"):
        trained_between(tmp_path, action, overlap, BUDGET)


def test_files_of_gradients_have_no_names(tmp_path: Path) -> None:
    """No file of gradients can be found during a training, so a kill leaves none."""
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = run_of(tmp_path, PLAIN, "none", budget=BUDGET)
        _, trainer, _ = train(run, Between(lambda *_: seen.extend(p.name for p in tmp_path.rglob("*")), steps=(3,)))
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert "state.bin" in seen and not [name for name in seen if "gradient" in name or name.endswith(".tmp")]


class TwoBackwards(LitTiny):
    """Adds the gradients of two losses of one graph, by its own loop, and then clips every value if it is told to."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False
        self.clip_value: float | None = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = self.model(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        if self.clip_value is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip_value, gradient_clip_algorithm="value")
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


@pytest.mark.parametrize("kind", long_but([TwoBackwards], [LitTiny, TwoBackwards]))
def test_values_that_are_clipped_and_a_second_backward(
    kind: type[LitTiny], tmp_path: Path, memories: list[Any]
) -> None:
    """Both go through all gradients, those on storage too, and change no bit; clipping changes the training."""
    recipe = dataclasses.replace(PLAIN, depth=4, max_steps=4)
    losses = {}
    for name, clip, transfer in (
        ("plain", None, {}),
        ("clipped", 1e-3, {}),
        ("budget", 1e-3, {"gradient_bytes": 2 * BUDGET}),
    ):
        strategy = SmartInfinityStrategy(tmp_path / name, zero=BUCKET, transfer={**SMALL_RING, **transfer})
        by_trainer = {} if kind is TwoBackwards else {"gradient_clip_val": clip, "gradient_clip_algorithm": "value"}
        module = kind(recipe)
        if isinstance(module, TwoBackwards):
            module.clip_value = clip
        quiet_trainer(tmp_path, strategy, precision=recipe.precision, max_steps=4, **by_trainer).fit(module)
        losses[name] = module.losses
    assert losses["budget"] == losses["clipped"]
    assert losses["plain"] != losses["clipped"]
    assert memories[0].counters().written_bytes > 0


@pytest.mark.parametrize("what", [{"skip_side_at": (4,), "nan_at": (6,)}, {"accumulate": 2}])
def test_what_comes_unexpectedly_in_a_binding_step(what: dict[str, Any], tmp_path: Path) -> None:
    """A parameter that is not used, an overflow later, and accumulation give the bits of a run without a budget."""
    recipe = dataclasses.replace(PLAIN, depth=4, max_steps=8, **what)
    straight = result(run_of(tmp_path / "straight", recipe, "none"))
    module, trainer, recorder = train(run_of(tmp_path / "bound", recipe, "backward", budget=4 * BUDGET))
    num_binding = trainer.strategy.optimizers[0].speculation.num_binding
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert num_binding > 2
    assert_same(((module.losses, module.validated, recorder.extra), recorder.masters), straight)


def test_space_for_parameters_and_gradients_is_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before parameters move, there must be room for them, for the state, and for gradients beyond their budget."""
    asked: list[set[str]] = []
    original = storage.require_space

    def note(requests: Any) -> None:
        asked.append({request.what for request in requests})
        original(requests)

    monkeypatch.setattr(storage, "require_space", note)
    transfer = {**SMALL_RING, "gradient_bytes": 2 * BUDGET, "parameter_bytes": 200_000}
    strategy = SmartInfinityStrategy(tmp_path / "s", zero={"offload_param": {"device": "nvme"}}, transfer=transfer)
    module = LitTiny(dataclasses.replace(PLAIN, depth=4, max_steps=1))
    quiet_trainer(tmp_path, strategy, precision="bf16-true", max_steps=1).fit(module)
    strategy.close()
    assert {"optimizer state", "parameters", "gradients that are not held in memory"} <= asked[0]


class All(LitTiny):
    """A module that passes all its parameters to its optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class WithFrozen(All):
    """A module with a frozen layer that is larger than all that it trains."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.large = torch.nn.Linear(512, 512).requires_grad_(False)


@pytest.mark.parametrize("zero", [{}, {"offload_param": {"device": "nvme"}}], ids=["in memory", "on storage"])
def test_frozen_parameters_need_no_room(zero: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for state and gradients, and what they take, is that of a model without it."""
    asked: list[list[tuple[str, int]]] = []
    original = storage.require_space

    def note(requests: Any) -> None:
        asked[-1] += [(each.what, each.needed_bytes) for each in requests if each.what != "parameters"]
        original(requests)

    monkeypatch.setattr(storage, "require_space", note)
    taken = []
    for kind in (All, WithFrozen):
        asked.append([])
        strategy = SmartInfinityStrategy(
            tmp_path / kind.__name__, zero=zero, transfer={**SMALL_RING, "gradient_bytes": 2 * BUDGET}
        )
        trainer = quiet_trainer(tmp_path, strategy, precision="bf16-true", max_steps=1)
        trainer.fit(kind(dataclasses.replace(PLAIN, depth=4, max_steps=1)))
        taken.append((strategy.state_bytes, strategy.state_numel, strategy.host_bytes["gradient_arena"]))
        strategy.close()
    assert {"optimizer state", "gradients that are not held in memory"} <= {what for what, _ in asked[0]}
    assert asked[0] == asked[1] and taken[0] == taken[1]

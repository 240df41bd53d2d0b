"""No bit of a training depends on where its state, parameters, gradients and activations lie, or on what overlaps.

A row of the table trains a recipe with some settings. The same recipe is trained once with all in memory, no overlap
and one folder; losses, validation, skipped steps, loss scale, step counts and masters are compared.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageTrafficMonitor
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.pipeline import handler
from tests.helpers.assertions import assert_equal
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.streamed_state import DEFAULTS, WRITTEN_BACK
from tests.helpers.trainers import quiet_trainer
from tests.helpers.unnamed import unnamed_files
from tests.pipeline.wandering import Wandering
from tests.training.actions import does
from tests.training.test_overlap import BUCKET, CASES, NVME, SMALL_RING, assert_same, result
from tests.training.worker import Run, launch

RECIPES: dict[str, tuple[Recipe, dict[str, Any], dict[str, Any]]] = {
    **{name: (dataclasses.replace(CASES[name][0], width=64, depth=2), CASES[name][1], {}) for name in CASES},
    "all budgets": (
        Recipe(precision="bf16-true", width=64, clip=0.3, groups=True, scheduler="step", max_steps=10),
        {"state_format": "bf16"},
        {},
    ),
    "added in bf16": (
        Recipe(precision="bf16-true", width=64, accumulate=4, groups=True, skip_side_at=(1,), max_steps=4),
        {},
        {"accumulate_in": "parameters"},
    ),
}
BUDGET = {"gradient_bytes": 192 << 10}
CACHE = {"dram_cache_bytes": 100_000}
OFFLOAD_ALL = {"activations": EVERYTHING}


def run_of(root: Path, name: str, *, overlap: str = "none", transfer: Any = None, **settings: Any) -> Run:
    """Return a run of a recipe: settings are those of the strategy, and ``folders``, ``save_at`` and ``resume``."""
    recipe, options, of_recipe = RECIPES[name]
    zero = {**BUCKET, **settings.pop("zero", {})}
    return Run(
        out=str(root),
        recipe=recipe,
        delays=None if overlap == "none" else 1,
        delay_us=500,
        storage=[str(root / f"disk{index}") for index in range(settings.pop("folders", 1))],
        save_at=settings.pop("save_at", ()),
        resume=settings.pop("resume", None),
        transfer={**SMALL_RING, **of_recipe, **(transfer or {})},
        options={**options, "overlap": overlap, "zero": zero, **settings},
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that trains a recipe once in memory."""

    @cache
    def trained(name: str) -> Any:
        recipe, options, transfer = RECIPES[name]
        options, transfer = {**options, "zero": BUCKET, "overlap": "none"}, {**SMALL_RING, **transfer}
        root = tmp_path_factory.mktemp("straight")
        return result(Run(out=str(root), recipe=recipe, transfer=transfer, options=options))

    return trained


def assert_used(strategy: Any, run: Run) -> None:
    """Assert that what the settings ask for did happen, so that the comparison means something."""
    traffic, optimizer = strategy.traffic(), strategy.optimizers[0]
    if "activations" in run.options:
        assert traffic.activation_read_bytes > 0
    if "gradient_bytes" in run.transfer:
        assert optimizer.rank_state.arena.counters().written_bytes > 0
    if "dram_cache_bytes" in run.transfer:
        assert traffic.cached_read_bytes > 0
    if run.transfer.get("durability") == "interval":
        assert traffic.cached_write_bytes > 0
    if run.options["zero"].get("offload_param", {}).get("device") == "nvme":
        assert strategy.parameter_bytes > 0
    updating = [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text() == "smart-inf-cpu\n"]
    assert len(updating) >= run.transfer.get("compute_threads", 1)


def nvme(zero: dict[str, Any] | None = None, **offload: Any) -> dict[str, Any]:
    return {**NVME, **(zero or {}), "offload_param": {"device": "nvme", **offload}}


# Each setting is in a row with others that do not hide it; overlaps, precisions and places are paired.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("32-true", {"overlap": "forward", "folders": 2, "save_at": (2,), "then": {"overlap": "forward", "folders": 3}}),
    ("32-true", {"overlap": "backward", **OFFLOAD_ALL}),
    ("32-true", {"transfer": BUDGET, "zero": nvme({"sub_group_size": 3000}), "save_at": (2,), "then": {}}),
    ("32-true", {"zero": {"overlap_comm": True, "sub_group_size": 3000}, "save_at": (2,), "then": {"zero": nvme()}}),
    (
        "32-true",
        {
            "zero": {"reduce_bucket_size": 10**16},
            "transfer": {"dram_cache_bytes": 1 << 30, "durability": "none"},
            "save_at": (2,),
            "then": {"transfer": {"dram_cache_bytes": 1 << 30, "durability": "none"}},
        },
    ),
    (
        "bf16-mixed",
        {
            "overlap": "forward",
            "zero": {"offload_param": {"device": "cpu", "pin_memory": True}},
            "transfer": {"compute_threads": 3},
        },
    ),
    ("bf16-mixed", {"overlap": "backward", "transfer": {**BUDGET, **CACHE}, "folders": 2}),
    (
        "bf16-mixed",
        {
            "overlap": "forward",
            "transfer": {"durability": "none"},
            "folders": 3,
            "zero": nvme({"sub_group_size": 3000}, max_in_cpu=9000),
        },
    ),
    ("bf16-mixed", {"transfer": CACHE, "zero": nvme({"overlap_comm": True}, pin_memory=False), **OFFLOAD_ALL}),
    ("bf16-mixed", {"overlap": "backward", "zero": nvme({"stage3_max_reuse_distance": 10**9}, buffer_count=100)}),
    ("nvme", {"overlap": "forward", "zero": nvme(), **OFFLOAD_ALL}),
    ("nvme", {"overlap": "backward", "zero": nvme(), "transfer": {"durability": "none", "direct_io": "off"}}),
    ("16-mixed", {"overlap": "forward", "zero": nvme()}),
    ("16-mixed", {"overlap": "backward"}),
    ("bf16-mixed", {"overlap": "forward", "transfer": {**DEFAULTS, "durability": "step"}}),
    ("bf16-mixed", {"overlap": "forward", "transfer": {**WRITTEN_BACK, "persist_every": 1}}),
    (
        "32-true",
        {
            "overlap": "backward",
            "folders": 2,
            "transfer": {**WRITTEN_BACK, **CACHE, "persist_every": 2},
            "save_at": (2,),
            "then": {"transfer": WRITTEN_BACK},
        },
    ),
    ("all budgets", {"overlap": "auto", "transfer": {**WRITTEN_BACK, "gradient_bytes": 200_000, "persist_every": 2}}),
    (
        "all budgets",
        {
            "overlap": "auto",
            "transfer": {"gradient_bytes": 200_000, "parameter_bytes": 200_000},
            "zero": {"offload_param": {"device": "nvme"}},
            **OFFLOAD_ALL,
        },
    ),
    ("added in bf16", {"overlap": "backward", "transfer": {"gradient_bytes": 96 << 10}}),
]


@pytest.mark.usefixtures("activations_as_asked")
@pytest.mark.parametrize(("name", "settings"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
def test_same_bits(
    name: str, settings: dict[str, Any], straight: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, clipping, skipped steps, unused, frozen and odd parameters; and ``then`` from its checkpoint."""
    monkeypatch.setattr(handler, "Balance", Wandering)  # tasklets change folders in every step
    settings = dict(settings)
    then = settings.pop("then", None)
    run = run_of(tmp_path / "first", name, **settings)
    found, expected = result(run, look=partial(assert_used, run=run)), straight(name)
    if run.transfer.get("durability") == "interval":  # a generation may get another number as it is written
        found, expected = (
            ((*of_run[:2], {**of_run[2], "generation": 0}), masters) for of_run, masters in (found, expected)
        )
    assert_same(found, expected)
    assert not list(tmp_path.rglob("*.bin")) and not unnamed_files(tmp_path)
    if then is not None:
        resumed = run_of(tmp_path / "then", name, **then, resume=str(tmp_path / "first" / "step-2.ckpt"))
        (losses, _, extra), masters = result(resumed)
        (expected_losses, _, expected), expected_masters = straight(name)
        assert (losses, extra["steps"]) == (expected_losses[2:], expected["steps"])
        assert_equal(masters, expected_masters)


def test_two_processes(tmp_path: Path) -> None:
    """Ranks with updates, budgets and files of their own skip a step together, and resume each other's checkpoints.

    What compression leaves out of the gradients is kept by each rank, whose partition has padding.
    """
    recipe = dataclasses.replace(
        CASES["bf16-mixed"][0], validate=False, nan_rank=1, epoch_batches=32, width=64, frozen=True, odd=True
    )
    partly = nvme({"sub_group_size": 9000}, max_in_cpu=20_000)
    compressed = {"compression": {"ratio": 0.05}}
    settings: dict[str, dict[str, Any]] = {
        "straight": {"save_at": (2,)},
        "budget": {"overlap": "backward", "transfer": {"gradient_bytes": 160 << 10}, **OFFLOAD_ALL},
        "partly on storage": {"overlap": "forward", "zero": partly},
        "resumed on storage": {"zero": partly, "resume": str(tmp_path / "straight" / "step-2.ckpt")},
        "compressed": {"save_at": (2,), **compressed},
        "compressed, resumed": {
            "overlap": "backward",
            "resume": str(tmp_path / "compressed" / "step-2.ckpt"),
            **compressed,
        },
    }
    runs = {
        name: dataclasses.replace(
            run_of(tmp_path / name, "bf16-mixed", **of_run), recipe=recipe, devices=2, storage=None
        )
        for name, of_run in settings.items()
    }
    outcomes = dict(zip(runs, launch(*runs.values()), strict=True))
    for name, outcome in outcomes.items():
        expected = outcomes["compressed" if name.startswith("compressed") else "straight"]
        first = 0 if runs[name].resume is None else 2 * recipe.accumulate
        assert expected.extra["skipped"] == [2]
        assert (outcome.losses, outcome.extra["steps"]) == (expected.losses[first:], expected.extra["steps"]), name
        assert_equal(outcome.masters, expected.masters)
    assert outcomes["compressed"].losses != outcomes["straight"].losses


# ---- activations on storage: what is counted, asked for and said, and forwards of unusual kinds


@pytest.mark.usefixtures("activations_as_asked")
def test_what_is_counted(tmp_path: Path) -> None:
    """Activations have counters of their own, and host memory while they train; only the wear includes their writes."""
    seen: list[Traffic] = []
    for activations in (None, EVERYTHING):
        held: list[int] = []
        strategy = SmartInfinityStrategy(tmp_path / "storage", activations=activations, overlap="none")
        looking = does(
            on_after_backward=lambda *_, held=held, strategy=strategy: held.append(
                strategy.host_bytes.get("activations", 0)
            )
        )
        monitor = StorageTrafficMonitor(every_n_steps=1, endurance_tbw=1.0)
        trainer = quiet_trainer(tmp_path, strategy, callbacks=[monitor, looking])
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
        seen.append(strategy.traffic())
        # The pool gives its memory back when the training is over.
        assert min(held) > 0 if activations else max(held) == 0
        assert strategy.host_bytes.get("activations") == (None if activations is None else 0)
        strategy.close()
        assert strategy.traffic() == Traffic()
    (plain, traffic), summary = seen, monitor.summary
    assert (
        plain.activation_read_bytes == plain.activation_write_bytes == 0
        and traffic.activation_read_bytes > 0
        and traffic.activation_write_bytes > 0
        and traffic.storage_write_bytes == plain.storage_write_bytes + traffic.activation_write_bytes
        and traffic.activation_wait_seconds > 0
    )
    for name in ("shared_read_bytes", "shared_write_bytes", "numel", "steps"):
        assert getattr(traffic, name) == getattr(plain, name), name
    assert summary["io/activation_write_GB"] == pytest.approx(traffic.activation_write_bytes / trainer.max_steps / 1e9)
    assert summary["io/activation_read_GB"] > 0 and summary["io/activation_wait_s"] > 0
    assert summary["io/bytes_per_parameter"] == pytest.approx(24, rel=0.5)
    assert summary["io/written_TB"] == pytest.approx(traffic.storage_write_bytes / 1e12)


class Manual(LitTiny):
    """A module whose backward runs within its training step, twice through each graph, while others are dropped."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for micro in range(2):
            tokens = self.recipe.batch(2 * batch_idx + micro)
            self.model(tokens)
            loss = self.model(tokens)
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(checkpoint: Callable[..., Any]) -> LitTiny:
    """Return a module whose blocks run below the checkpoints of DeepSpeed or torch."""
    module = LitTiny(Recipe(precision="bf16-mixed"))
    for block in module.model.blocks:
        block.forward = partial(checkpoint, block.forward)
    return module


UNUSUAL: dict[str, Callable[[], LitTiny]] = {
    "two manual backwards": lambda: Manual(Recipe(precision="bf16-mixed")),
    "deepspeed": lambda: checkpointed(lambda *inputs: deepspeed.checkpointing.checkpoint(*inputs)),
    "reentrant": lambda: checkpointed(partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)),
    "not reentrant": lambda: checkpointed(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)),
}


@pytest.mark.usefixtures("activations_as_asked")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_forwards(name: str, tmp_path: Path) -> None:
    """Backward may run within forward, twice, or never; inputs of checkpoints move, but for those DeepSpeed keeps."""
    seen = []
    for activations in (None, EVERYTHING):
        strategy = SmartInfinityStrategy(tmp_path / str(activations is None), activations=activations)
        module = UNUSUAL[name]()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            quiet_trainer(tmp_path, strategy).fit(module)
        seen.append(module.losses)
        said = [str(each.message) for each in told if "deepspeed.checkpointing keeps" in str(each.message)]
        assert len(said) == (name == "deepspeed" and activations is not None)
        if activations is not None:
            hidden = strategy.optimizers[0].rank_state.activations.hidden_bytes
            block_input = 2 * 2 * 16 * 32  # bytes, in bf16
            assert (
                hidden == (3 * 2 * block_input if name == "deepspeed" else 0)
                and strategy.traffic().activation_read_bytes > 0
            )
        strategy.close()
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("activations_as_asked")
@pytest.mark.parametrize(("keep", "unmeasured"), [("auto", 7), (0, 0)])
def test_overlaps_are_measured_when_it_is_chosen_what_leaves(keep: int | str, unmeasured: int, tmp_path: Path) -> None:
    """With overlap="auto", the seven steps in which that is settled are not measured, unless the user has chosen."""
    modes: list[str] = []
    note = does(on_train_batch_end=lambda trainer, _: modes.append(trainer.strategy.optimizers[0].overlap.mode))
    strategy = SmartInfinityStrategy(tmp_path / "storage", activations={"min_bytes": 1, "keep": keep})
    quiet_trainer(tmp_path, strategy, max_steps=15, callbacks=[note]).fit(LitTiny(Recipe(precision="bf16-mixed")))
    assert modes[: unmeasured + 8] == (unmeasured + 4) * ["forward"] + 4 * ["backward"]

"""Updates that run beside the next forward change no bit, whatever reads the state or fails meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from lightning_smartinfinity import SmartInfinityStrategy, StorageError
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.gather_methods import Gather
from tests.fabric import worker as fabric_worker
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.training.worker import Run, launch, train

# A tasklet holds about two layers, and the ring holds only a few tasklets.
SMALL_RING = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
BF16 = Recipe(precision="bf16-mixed", depth=1, max_steps=4)
NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}

CASES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    # The parameters are the masters. The recipe has groups and unused, frozen and odd parameters.
    "32-true": (
        Recipe(groups=True, depth=1, skip_side_at=(1,), frozen=True, odd=True, scheduler="step", max_steps=4),
        {},
    ),
    # Windows of two micro-batches and of one, clipping, a step skipped for a NaN, and validation. The masters are
    # stored as the parameters and a remainder.
    "bf16-mixed": (
        dataclasses.replace(
            BF16, accumulate=2, epoch_batches=3, clip=0.3, nan_at=(2,), validate=True, groups=True, max_steps=5
        ),
        {"state_format": "int8_remainder"},
    ),
    # The loss scale makes the first steps overflow and be skipped.
    "16-mixed": (dataclasses.replace(BF16, precision="16-mixed"), {"initial_scale_power": 22, "hysteresis": 1}),
    "nvme": (dataclasses.replace(BF16, tied=False), {"zero": NVME}),
    "cpu": (dataclasses.replace(BF16, precision="32-true"), {"zero": {"offload_param": {"device": "cpu"}}}),
}


def run_of(root: Path, name: str, overlap: str, **settings: Any) -> Run:
    recipe, options = CASES[name]
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, options={**options, "overlap": overlap}, **settings)


def result(run: Run) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train and return losses, validation, recorded figures and masters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, trainer, recorder = train(run)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return (module.losses, module.validated, recorder.extra), recorder.masters


def assert_same(ours: tuple[Any, dict[str, torch.Tensor]], theirs: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert repr(ours[0]) == repr(theirs[0])  # as text, NaNs are equal
    assert ours[1].keys() == theirs[1].keys()
    for name, master in theirs[1].items():
        assert torch.equal(ours[1][name], master), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that trains a case once without overlap."""
    known: dict[str, Any] = {}

    def trained(name: str) -> Any:
        if name not in known:
            known[name] = result(run_of(tmp_path_factory.mktemp("straight"), name, "none"))
        return known[name]

    return trained


@pytest.mark.parametrize(
    ("seed", "name"),
    long_but([(0, "32-true"), (0, "bf16-mixed"), (0, "nvme")], itertools.product(range(2), CASES)),
)
def test_same_bits(name: str, seed: int, straight: Callable[[str], Any], tmp_path: Path) -> None:
    """Losses, masters, skipped steps, loss scale and step counts stay the same, however late transfers end."""
    assert_same(result(run_of(tmp_path, name, "forward", delays=seed)), straight(name))


@pytest.mark.long
def test_without_the_waits_it_would_differ(
    straight: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delays are long enough: without the waits the next forward would read old parameters.

    This shows what ``test_same_bits`` is worth, which always runs.
    """
    monkeypatch.setattr(UpdateInFlight, "_wait_for", lambda self, wanted: None)
    (losses, *_), _ = result(run_of(tmp_path, "32-true", "forward", delays=0, delay_us=100_000))
    assert losses != straight("32-true")[0][0]


def test_a_checkpoint_in_the_middle(straight: Callable[[str], Any], tmp_path: Path) -> None:
    """The checkpoint holds the step that was in flight, and a run resumed from it gives the same bits."""
    result(run_of(tmp_path / "first", "32-true", "forward", delays=0, save_at=(2,)))
    resume = str(tmp_path / "first" / "step-2.ckpt")
    (losses, _, extra), masters = result(run_of(tmp_path / "second", "32-true", "forward", delays=1, resume=resume))
    (expected_losses, _, expected_extra), expected = straight("32-true")
    assert losses == expected_losses[2:]
    assert extra["steps"] == expected_extra["steps"]
    assert all(torch.equal(masters[name], expected[name]) for name in expected)


def test_two_processes(tmp_path: Path) -> None:
    """Two ranks whose updates take different times give the same bits."""
    recipe = dataclasses.replace(CASES["bf16-mixed"][0], validate=False)
    none, forward = (
        Run(
            out=str(tmp_path / overlap),
            recipe=recipe,
            devices=2,
            delays=delays,
            transfer=SMALL_RING,
            options={"overlap": overlap},
        )
        for overlap, delays in (("none", None), ("forward", 1))
    )
    expected, outcome = launch(none, forward)
    assert_same(
        (repr((outcome.losses, outcome.extra)), outcome.masters),
        (repr((expected.losses, expected.extra)), expected.masters),
    )


def test_a_loop_in_fabric(tmp_path: Path) -> None:
    """Scheduler, clipping, accumulation, and a save and load in the middle change no bit."""
    recipe = dataclasses.replace(BF16, groups=True, scheduler="step", clip=0.3, accumulate=2, skip_side_at=(1,))
    runs = {
        overlap: fabric_worker.Run(
            out=str(tmp_path / overlap), recipe=recipe, save_at=(2,), transfer=SMALL_RING, options={"overlap": overlap}
        )
        for overlap in ("none", "forward")
    }
    outcomes = {overlap: fabric_worker.train(run) for overlap, run in runs.items()}
    assert outcomes["forward"] == dataclasses.replace(outcomes["none"], masters=outcomes["forward"].masters)
    resumed = fabric_worker.train(
        dataclasses.replace(runs["forward"], resume=str(tmp_path / "forward" / "step-2.ckpt"), save_at=())
    )
    assert resumed.losses == outcomes["none"].losses[-len(resumed.losses) :]
    for name, master in outcomes["none"].masters.items():
        assert torch.equal(outcomes["forward"].masters[name], master), name
        assert torch.equal(resumed.masters[name], master), name


# ---- accesses that finish the update


def read_state(trainer: pl.Trainer, module: LitTiny) -> None:
    safe_get_full_fp32_param(module.model.norm.weight)


def write_state(trainer: pl.Trainer, module: LitTiny) -> None:
    value = safe_get_full_fp32_param(module.model.norm.weight)
    safe_set_full_fp32_param(module.model.norm.weight, value)


def write_parameter(trainer: pl.Trainer, module: LitTiny) -> None:
    with deepspeed.zero.GatheredParameters([module.model.norm.weight], modifier_rank=0), torch.no_grad():
        module.model.norm.weight.add_(0)


def refresh_masters(trainer: pl.Trainer, module: LitTiny) -> None:
    trainer.strategy.optimizers[0].refresh_fp32_params()


def save(trainer: pl.Trainer, module: LitTiny) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def drain(trainer: pl.Trainer, module: LitTiny) -> None:
    trainer.strategy.drain()  # type: ignore[attr-defined]


ACCESSES = [read_state, write_state, write_parameter, refresh_masters, save, drain]


class Access(pl.Callback):
    """A callback that accesses state after every step and records whether the update was in flight before and after."""

    def __init__(self, access: Callable[[pl.Trainer, Any], None]) -> None:
        self.access = access
        self.seen: list[tuple[bool, bool]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        handler = trainer.strategy.optimizers[0].rank_state.handler
        before = handler.in_flight
        self.access(trainer, pl_module)
        self.seen.append((before, handler.in_flight))


@pytest.mark.parametrize("access", ACCESSES, ids=lambda access: access.__name__)
def test_what_reads_or_writes_from_outside_finishes_the_update(
    access: Callable[[pl.Trainer, Any], None], straight: Callable[[str], Any], tmp_path: Path
) -> None:
    """After the access nothing is in flight, and training continues with the same losses."""
    recipe = dataclasses.replace(CASES["cpu"][0], max_steps=3)
    module, callback = LitTiny(recipe), Access(access)
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="forward")
    quiet_trainer(tmp_path, strategy, callbacks=[callback], precision=recipe.precision).fit(module)
    assert callback.seen == [(True, False)] * 3
    assert module.losses == straight("cpu")[0][0][:3]


# ---- failures


class FailAt(pl.Callback):
    """A callback that makes transfers of one step's update fail."""

    def __init__(self, step: int, **faults: int) -> None:
        self.step, self.faults = step, faults

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            handler = trainer.strategy.optimizers[0].rank_state.handler
            handler.finish()
            testing.inject(handler._device._pipeline, max_delay_us=1000, **self.faults)


@pytest.mark.parametrize(
    ("faults", "zero"),
    [
        pytest.param({"fail_read_at": 0}, None, id="read-in memory"),
        pytest.param({"fail_write_at": 0}, NVME, id="write-nvme"),
        pytest.param({"fail_read_at": 0}, NVME, id="read-nvme", marks=pytest.mark.long),
        pytest.param({"fail_write_at": 0}, None, id="write-in memory", marks=pytest.mark.long),
    ],
)
def test_a_failure_in_the_background_rolls_the_step_back(
    faults: dict[str, int], zero: dict[str, Any] | None, tmp_path: Path
) -> None:
    """The error is raised while the next step is computed. The state before the failed step can be saved."""
    recipe = dataclasses.replace(BF16, precision="32-true")
    root = tmp_path / "failing"
    strategy = SmartInfinityStrategy(root / "storage", overlap="forward", zero=zero)
    trainer = quiet_trainer(root, strategy, callbacks=[FailAt(2, **faults)], max_steps=4, precision="32-true")
    module = LitTiny(recipe)
    with pytest.raises(StorageError, match=r"state\.bin"):
        trainer.fit(module)
    assert trainer.global_step == 3 and len(module.losses) in (3, 4)
    optimizer = trainer.strategy.optimizers[0]
    assert optimizer.update.drained_handler().generation == 2
    two_steps = dataclasses.replace(recipe, max_steps=2)
    options = {} if zero is None else {"zero": zero}
    _, masters = result(Run(out=str(tmp_path / "straight"), recipe=two_steps, options=options))
    trainer.save_checkpoint(root / "rescued.ckpt")
    for name, param in module.model.named_parameters():
        assert torch.equal(optimizer.get_full_hp_param(param), masters[name]), name
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, masters[name]), name
    strategy.close()


def test_an_interrupt_while_the_update_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends training, and a checkpoint holds the step that was in flight."""
    wait = UpdateInFlight._wait_for

    def interrupted(self: UpdateInFlight, wanted: Any) -> None:
        if self._rank_state.handler.generation == 1:
            monkeypatch.setattr(UpdateInFlight, "_wait_for", wait)
            raise KeyboardInterrupt
        wait(self, wanted)

    monkeypatch.setattr(UpdateInFlight, "_wait_for", interrupted)
    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="forward")
    trainer = quiet_trainer(tmp_path, strategy, max_steps=4)
    module = LitTiny(BF16)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    assert strategy.optimizers[0].update.drained_handler().generation == trainer.global_step == 2
    _, masters = result(Run(out=str(tmp_path / "straight"), recipe=dataclasses.replace(BF16, max_steps=2)))
    for name, param in module.model.named_parameters():
        assert torch.equal(strategy.optimizers[0].get_full_hp_param(param), masters[name]), name
    strategy.close()


def test_closing_commits_the_step_in_flight(tmp_path: Path) -> None:
    """Closing after the last step of a Fabric loop leaves the parameters of that step in memory."""
    fabric = fabric_worker.quiet_fabric(tmp_path / "storage", options={"overlap": "forward"}, precision="32-true")
    recipe = dataclasses.replace(BF16, precision="32-true", tied=False)
    module = recipe.build_model()
    model, optimizer = fabric.setup(module, recipe.build_optimizer(list(module.named_parameters())))
    inner = optimizer.engine.optimizer
    testing.inject(inner.update.drained_handler()._device._pipeline, max_delay_us=20_000)
    fabric_worker._window(fabric, model, recipe, 0)
    optimizer.step()
    handler = inner.rank_state.handler
    assert handler.in_flight
    fabric.strategy.close()
    assert handler.generation == 1 and not handler.in_flight
    values = [param.detach().clone() for param in _gathered(module)]
    assert all(torch.equal(a, b) for a, b in zip(values, _after_one_step(tmp_path, recipe), strict=True))


def _gathered(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for param in module.parameters():
        with deepspeed.zero.GatheredParameters([param]):
            yield param


def _after_one_step(root: Path, recipe: Recipe) -> list[torch.Tensor]:
    fabric = fabric_worker.quiet_fabric(root / "plain", options={"overlap": "none"}, precision="32-true")
    module = recipe.build_model()
    model, optimizer = fabric.setup(module, recipe.build_optimizer(list(module.named_parameters())))
    fabric_worker._window(fabric, model, recipe, 0)
    optimizer.step()
    fabric.strategy.close()
    return [param.detach().clone() for param in _gathered(module)]


def test_auto_changes_nothing_but_time(tmp_path: Path) -> None:
    """The bits stay the same with every overlap that "auto" tries and with the one that it chooses."""
    recipe = dataclasses.replace(BF16, max_steps=10, clip=0.3, groups=True)
    results = []
    for overlap in ("none", "auto"):
        options = {"overlap": overlap, "state_format": "bf16"}
        results.append(result(Run(out=str(tmp_path / overlap), recipe=recipe, transfer=SMALL_RING, options=options)))
    assert_same(*results)


def test_without_overlap_small_parameters_are_gathered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens at the end of the step; beside an update each is gathered when its module runs."""
    call, calls = Gather.__call__, []
    monkeypatch.setattr(Gather, "__call__", lambda self, *args, **kw: (calls.append(1), call(self, *args, **kw))[1])
    last = {}
    for overlap in ("none", "forward"):
        # Prefetching would gather all of a model as small as this one.
        strategy = SmartInfinityStrategy(tmp_path / overlap, overlap=overlap, zero={"stage3_prefetch_bucket_size": 0})
        marks: list[int] = []
        mark = Access(lambda trainer, module, marks=marks: marks.append(len(calls)))  # type: ignore[misc]
        quiet_trainer(tmp_path, strategy, callbacks=[mark], max_steps=4).fit(LitTiny(BF16))
        last[overlap] = marks[-1] - marks[-2]
        strategy.close()
    assert last["none"] < last["forward"]

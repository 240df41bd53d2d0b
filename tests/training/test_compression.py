"""Compressed gradients in a Trainer: what is sent and what is kept, also on storage, and the warning of no gain."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters

from lightning_smartinfinity import (
    BlockScaled,
    ConfigError,
    CudaError,
    SmartInfinityStrategy,
    StorageError,
    TopK,
    TransferConfig,
)
from lightning_smartinfinity.pipeline.gradients import compressed_gradients, device_selection
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients, feed_back_threads
from lightning_smartinfinity.pipeline.handler import TransferHandler
from lightning_smartinfinity.planning import automatic_strategy, cost
from lightning_smartinfinity.planning.automatic_strategy import warn_of_no_gain
from lightning_smartinfinity.storage.records.residual_write import ResidualWrite
from lightning_smartinfinity.zero3.optimizer import open_state
from lightning_smartinfinity.zero3.settings import OffloadSettings
from tests.helpers import reference
from tests.helpers.assertions import assert_equal
from tests.helpers.card_runs import setup_of
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import LIMIT
from tests.reliability.faults import Interrupted, same
from tests.stock.systems import Hook
from tests.training.actions import does
from tests.training.test_loop_exceptions import Broken
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run

# The recipe has groups, a schedule, accumulation, clipping, a parameter that some steps do not use, and a step that is
# skipped for a NaN.
BASE = Recipe(
    groups=True, scheduler="step", skip_side_at=(1,), nan_at=(2,), depth=1, max_steps=4, accumulate=2, clip=0.3
)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
CODECS = {
    "top 5 %": TopK(0.05),
    "top 5 %, without error feedback": TopK(0.05, error_feedback=False),
    "top 5 % of a sample, in bf16": TopK(0.05, exact=False, value_dtype="bf16"),
    "8 bits": BlockScaled(),
}

Result = tuple[Any, dict[str, torch.Tensor]]


def run_of(root: Path, precision: str, codec: Any, *, overlap: str = "none", **settings: Any) -> Run:
    """Return a run whose updates take several tasklets."""
    recipe = dataclasses.replace(BASE, precision=precision)
    options = {"overlap": overlap, "compression": codec}
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, options=options, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Result, Path]]:
    """Return a function that trains a case once without overlap and gives its result and its checkpoint at step 2."""

    @cache
    def trained(precision: str, name: str | None) -> tuple[Result, Path]:
        root = tmp_path_factory.mktemp("straight")
        codec = None if name is None else CODECS[name]
        return result(run_of(root, precision, codec, save_at=(2,))), root / "step-2.ckpt"

    return trained


@pytest.mark.filterwarnings("ignore:.*no gain")
@pytest.mark.parametrize(
    ("precision", "error_feedback"), long_but([("bf16-mixed", True)], itertools.product(PRECISIONS, [True, False]))
)
def test_sending_everything_changes_no_bit(precision: str, error_feedback: bool, straight: Any, tmp_path: Path) -> None:
    """With ratio=1 nothing is compressed, and the other settings are ignored."""
    with pytest.warns(UserWarning, match="value_dtype and exact are ignored"):
        codec = TopK(1.0, error_feedback=error_feedback, value_dtype="bf16")
    assert_same(result(run_of(tmp_path, precision, codec)), straight(precision, None)[0])


@pytest.mark.parametrize(
    ("name", "precision", "overlap"),
    long_but(
        [
            ("top 5 %", "32-true", "forward"),
            ("top 5 %, without error feedback", "16-mixed", "backward"),
            ("top 5 % of a sample, in bf16", "bf16-mixed", "backward"),
            ("8 bits", "bf16-mixed", "forward"),
        ],
        itertools.product(CODECS, PRECISIONS, ["forward", "backward"]),
    ),
)
def test_overlap_and_resume_change_no_bit(
    name: str, precision: str, overlap: str, straight: Any, tmp_path: Path
) -> None:
    """An update that is rolled back leaves the residual unchanged, and a checkpoint restores it."""
    (expected, expected_masters), checkpoint = straight(precision, name)
    run = run_of(tmp_path / "whole", precision, CODECS[name], overlap=overlap, delays=0)
    assert_same(result(run), (expected, expected_masters))
    (losses, _, _), masters = result(dataclasses.replace(run, out=str(tmp_path / "resumed"), resume=str(checkpoint)))
    assert losses == expected[0][2 * BASE.accumulate :]
    assert_equal(masters, expected_masters)


def select_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select with torch on the CPU, as on a GPU."""

    def on_device(*args: Any, **kwargs: Any) -> CompressedGradients:
        return CompressedGradients(*args, **{**kwargs, "device": torch.device("cpu")})

    monkeypatch.setattr(open_state, "CompressedGradients", on_device)


@pytest.mark.parametrize("begun", [0, 1])
def test_no_memory_to_select_on_a_device(begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory for the first or second tasklet raises our own error, and no step is committed."""
    select_on_cpu(monkeypatch)
    select, selected = device_selection.top_k_payload, []

    def fail(*args: Any, **settings: Any) -> torch.Tensor:
        if len(selected) == begun:
            raise torch.OutOfMemoryError("too much")
        selected.append(1)
        return select(*args, **settings)

    monkeypatch.setattr(device_selection, "top_k_payload", fail)
    strategy = SmartInfinityStrategy(
        tmp_path / "state", compression=TopK(0.05), overlap="none", transfer=TransferConfig(**SMALL_RING)
    )
    with pytest.raises(CudaError, match=r"no memory on cpu.*too much.*smaller tasklets"):
        fit(LitTiny(Recipe(depth=1, max_steps=1)), tmp_path, strategy, max_steps=1)
    assert strategy._training_optimizer is not None
    assert (strategy._training_optimizer.rank_state.handler.generation, len(selected)) == (0, begun)


def sent(gradients: dict[str, torch.Tensor], ratio: float) -> dict[str, torch.Tensor]:
    """Return the largest gradients of all parameters, with zeros elsewhere."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    chosen = flat.abs().topk(math.ceil(ratio * len(flat))).indices
    kept = torch.zeros_like(flat).index_copy(0, chosen, flat[chosen])
    parts = kept.split([gradient.numel() for gradient in gradients.values()])
    return {name: part.view_as(gradient) for (name, gradient), part in zip(gradients.items(), parts, strict=True)}


@pytest.mark.parametrize(
    ("error_feedback", "clip"),
    long_but([(True, 0.1), (False, None)], itertools.product([True, False], [None, 0.1])),
)
def test_trains_like_torch_with_the_same_compression(error_feedback: bool, clip: float | None, tmp_path: Path) -> None:
    """With one tasklet, training equals a torch loop that applies the largest sums of gradient and residual.

    Clipping does not scale the residual. It uses the norm of the gradients before compression. A gradient that is not
    finite reaches neither the update nor the residual.
    """
    recipe = Recipe(max_steps=5, depth=1, precision="32-true", accumulate=2, nan_at=(2,))
    residual: dict[str, torch.Tensor] = {}
    factors: list[float] = []

    def compress(step: int, live: dict[str, torch.nn.Parameter]) -> None:
        if step in recipe.nan_at:
            return
        gradients = {name: master.grad for name, master in live.items() if master.grad is not None}
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        factors.append(1.0 if clip is None else max(1.0, (norm + 1e-6) / clip))
        total = {name: gradient + residual.get(name, torch.zeros(())) for name, gradient in gradients.items()}
        for name, value in sent(total, 0.1).items():
            if error_feedback:
                residual[name] = total[name] - value
            live[name].grad = value / factors[-1]

    expected = reference.train(recipe, skipped=recipe.nan_at, before_update=compress)
    assert clip is None or min(factors) > 2
    options = {"compression": TopK(0.1, error_feedback=error_feedback), "overlap": "none"}
    run = Run(out=str(tmp_path), recipe=dataclasses.replace(recipe, clip=clip), options=options)
    (losses, _, _), masters = result(run)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-5, rtol=0)
    for name, master in expected.masters.items():
        torch.testing.assert_close(masters[name], master, atol=1e-5, rtol=0, msg=name)


pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain", "ignore:A step was skipped")

PLAIN = Recipe(depth=1, max_steps=4, precision="32-true")


def strategy_in(root: Path, overlap: str = "none", *, error_feedback: bool = True) -> SmartInfinityStrategy:
    codec = TopK(0.05, error_feedback=error_feedback)
    return SmartInfinityStrategy(root / "state", compression=codec, overlap=overlap, transfer=SMALL_RING)


def test_checkpoint_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A residual that the checkpoint lacks begins at zero; one that is not needed is left out. Both log a warning."""
    begun: list[torch.Tensor] = []

    def note(trainer: Any, module: Any) -> None:
        begun.append(trainer.strategy._training_optimizer.rank_state.compressed.residual.clone())

    for error_feedback in (True, False):
        saving, loading = (tmp_path / f"{what} {error_feedback}" for what in ("saved", "loaded"))
        trainer = fit(LitTiny(PLAIN), saving, strategy_in(saving, error_feedback=error_feedback), max_steps=2)
        trainer.save_checkpoint(saving / "half.ckpt")
        trainer.strategy.close()  # type: ignore[attr-defined]
        strategy = strategy_in(loading, error_feedback=not error_feedback)
        callbacks = [] if error_feedback else [does(on_train_start=note, on_train_end=note)]
        trainer = quiet_trainer(loading, strategy, max_steps=3, callbacks=callbacks)
        trainer.fit(LitTiny(PLAIN), ckpt_path=saving / "half.ckpt")
    assert not begun[0].any() and begun[1].any()
    half = strategy_in(tmp_path / "half")
    half.initial_scale_power = 10
    note_end = does(on_train_end=note)
    fit(LitTiny(PLAIN), tmp_path / "half", half, max_steps=1, precision="16-mixed", callbacks=[note_end])
    fit(LitTiny(PLAIN), tmp_path / "full", strategy_in(tmp_path / "full"), max_steps=1, callbacks=[note_end])
    unscaled, exact = (float(residual.abs().max()) for residual in begun[2:])
    assert unscaled == pytest.approx(exact, rel=0.05), "the residual has a loss scale"
    left_out, at_zero = (record for record in caplog.records if "residual" in record.message)
    assert (
        "residual of compressed gradients is left out" in left_out.message
        and at_zero.levelno == logging.WARNING
        and "begins at zero: the checkpoint gives none" in at_zero.message
    )


# ---- residuals go to storage beside the training; what cannot be recorded is told once


@pytest.mark.parametrize("overlap", long_but(["backward"], ["none", "forward", "backward"]))
def test_a_fit_that_is_resumed(tmp_path: Path, overlap: str) -> None:
    """It ends with the residual and the masters of a fit that never stopped."""
    interrupted = Interrupted(tmp_path, PLAIN, overlap=overlap)
    assert same(interrupted.resumed(), interrupted.expected)


@pytest.mark.parametrize(
    ("overlap", "hook"),
    long_but(
        [("none", "on_after_backward"), ("backward", "on_train_batch_start")],
        [("none", "on_after_backward"), ("forward", "on_after_backward"), ("backward", "on_train_batch_start")],
    ),
)
def test_training_goes_on_while_it_is_written(
    tmp_path: Path, overlap: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk answers only late in the next batch. No update begins before it has, and no batch waits earlier."""
    go_on, write, begun = threading.Event(), ResidualWrite._write, []
    go_on.set()  # for the record of the fit's beginning

    def held(self: Any, values: Any) -> None:
        assert go_on.wait(LIMIT)
        write(self, values)
        begun.append("written")

    def noted(name: str) -> None:
        begin = getattr(TransferHandler, name)

        def beginning(self: Any, plan: Any, **settings: Any) -> None:
            begin(self, plan, **settings)
            assert self._store.records._residual_write is None
            begun.append("update")

        monkeypatch.setattr(TransferHandler, name, beginning)

    class Letting(LitTiny):
        def on_before_optimizer_step(self, *_: Any) -> None:
            if begun.count("update") < 2:
                go_on.set()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step < PLAIN.max_steps:
                go_on.clear()

    monkeypatch.setattr(ResidualWrite, "_write", held)
    noted("begin_step")
    noted("begin_incremental")
    module = Letting(PLAIN)
    setattr(module, hook, lambda *_: go_on.set())
    fit(module, tmp_path, strategy_in(tmp_path, overlap), max_steps=4)
    assert begun.count("update") == 4 and begun.count("written") >= 4


FROZEN = Recipe(frozen=True, depth=1, max_steps=4)
CANNOT = "An interrupted training cannot be resumed from storage here"


class Breaking(LitTiny):
    """A module that notes the warnings before each batch, and raises in its fourth step."""

    def __init__(self, told: list[warnings.WarningMessage]) -> None:
        super().__init__(FROZEN)
        self.told, self.before = told, [""]

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(" ".join(str(one.message) for one in self.told))
        if self.trainer.global_step == 3:
            raise Broken


def write_frozen(trainer: Any) -> None:
    """Write to a parameter that is not trained."""
    frozen = next(parameter for parameter in trainer.lightning_module.parameters() if not parameter.requires_grad)
    with GatheredParameters([frozen], modifier_rank=0):
        frozen.data.mul_(2.0)


class OddState(pl.Callback):
    """Has a state that is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [1, object()]}


@pytest.mark.parametrize(
    ("callback", "num_before", "reason"),
    [
        (None, 1, "Cannot write"),
        (OddState(), 0, r"\['checkpoint'\]\['callbacks'\]\['OddState'\]\['kept'\]\[1\] is a object, which"),
        (Hook(2, write_frozen), 2, "a parameter that is not trained was written, and storage holds none of these"),
    ],
    ids=["residual", "state of a callback", "frozen parameter"],
)
def test_a_fit_that_cannot_be_recorded(
    callback: pl.Callback | None, num_before: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is named before the first batch, a write to a frozen parameter behind its batch; each once.

    So is a disk that takes no residual.
    """
    if callback is None:
        fails = mock.Mock(side_effect=StorageError("Cannot write.", "Look at the disk."))
        monkeypatch.setattr(ResidualWrite, "_write", fails)
    strategy = strategy_in(tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = Breaking(told)
        with pytest.raises(Broken):
            quiet_trainer(tmp_path, strategy, max_steps=4, callbacks=callback).fit(module)
    strategy.close()
    found = [str(one.message) for one in told if CANNOT in str(one.message)]
    assert (
        len(found) == 1
        and re.search(reason, found[0])
        and [CANNOT in before for before in module.before[1:]] == [number >= num_before for number in range(4)]
    )
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state"), max_steps=4)
    with pytest.raises(StorageError, match="There is no optimizer state"):
        again.fit(LitTiny(FROZEN), ckpt_path="storage")


def test_a_state_with_one_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With ``durability="none"`` the fit says once that nothing can be resumed, and resuming is refused."""
    transfer = {"durability": "none"}
    strategy = SmartInfinityStrategy(tmp_path / "state", transfer=transfer)
    quiet_trainer(tmp_path, strategy, max_steps=2).fit(LitTiny(FROZEN))
    told = [record.getMessage() for record in caplog.records if CANNOT in record.getMessage()]
    assert len(told) == 1 and "durability='none' leaves its state half written" in told[0]
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "state", transfer=transfer), max_steps=2)
    with pytest.raises(ConfigError, match="the settings ask to keep nothing to resume from"):
        again.fit(LitTiny(FROZEN), ckpt_path="storage")


# ---- the warning of no gain on SmartSSDs uses the prediction for all cards of the machine


QUICK = TopK(0.01, error_feedback=False)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be rank 0 on a machine with 64 cores."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for module in (automatic_strategy, compressed_gradients):
        monkeypatch.setattr(module, "available_cores", lambda: 64)


def reasons(
    codec: TopK, cards: int, *, num_processes: int = 1, sharers: int = 1, on_gpu: bool = False, **settings: Any
) -> list[str]:
    """Return the warnings with fp32 gradients."""
    setup = setup_of(cards, Path("none.xclbin"), sharers=sharers, **settings)
    offload = OffloadSettings(
        storage=(Path("none"),), transfer=TransferConfig(), compression=codec, smartssd=setup.settings, cards=setup
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_no_gain(offload, num_arrays=3, num_processes=num_processes, on_gpu=on_gpu)
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("codec", "cards", "settings", "told"),
    [
        (QUICK, 4, {"gradient_route": "storage"}, ()),  # gradients pass through the SSDs
        (QUICK, 14, {}, ()),  # enough cards share the channel
        (QUICK, 4, {}, ("predicted to bring no gain", "to 4 device(s)", "not the channel")),
        (TopK(0.01), 14, {}, ("takes longer than it saves",)),  # one thread takes too long for the residual
        (QUICK, 2, {"num_processes": 7}, ()),  # the cards of all processes count
        (QUICK, 2, {"num_processes": 7, "sharers": 7}, ("to 2 device(s)",)),  # and each of them once
    ],
)
def test_warned_where_it_does_not_gain(
    codec: TopK, cards: int, settings: dict[str, Any], told: tuple[str, ...]
) -> None:
    """The warning names the reason."""
    warned = reasons(codec, cards, **settings)
    assert len(warned) == bool(told) and all(text in warned[0] for text in told)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("compute", "processes", "threads"), [(1, 1, 8), (1, 4, 2), (1, 100, 1), (12, 1, 12)])
def test_all_cores_feed_the_residual(compute: int, processes: int, threads: int) -> None:
    """The residual uses at most eight cores of a machine, and never fewer threads than the update."""
    assert feed_back_threads(compute, processes) == threads


@pytest.mark.usefixtures("machine")
def test_choosing_on_the_gpu_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection on the GPU brings a gain even where a CPU core would be too slow."""
    monkeypatch.setattr(cost, "_TOP_K", dataclasses.replace(cost._TOP_K, compress={False: 1e-7, True: 1e-7}))
    (slow,) = reasons(QUICK, 14)
    assert "takes longer than it saves" in slow and reasons(QUICK, 14, on_gpu=True) == []

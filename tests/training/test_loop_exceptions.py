"""A fit that an exception or Ctrl-C ends leaves the last committed step."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, StorageTimeoutError, UnsupportedError
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.plain import Everything, assert_like_plain_lightning
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import assert_threads_end, join, num_threads
from tests.training.actions import does


class Broken(Exception):
    """An exception in the user's code."""


class Breaking(Everything):
    """A module that raises at one place of a step, the third one."""

    def __init__(self, place: str | None, *, step: int = 2) -> None:
        super().__init__()
        self.place, self.step = place, step
        norm: Any = self.model.blocks[0].norm2
        norm.register_forward_pre_hook(lambda *_: self.at("forward"))

    def at(self, place: str) -> None:
        trainer = self._trainer
        if self.place == place and trainer is not None and trainer.training and trainer.global_step == self.step:
            raise Broken

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return _BreakOff.apply(loss, self) if self.place == "backward" else loss

    def on_after_backward(self) -> None:
        self.at("on_after_backward")


class _BreakOff(torch.autograd.Function):
    """An identity for the loss whose backward pass fails in the middle of the model's backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, module: Breaking) -> torch.Tensor:
        ctx.handles = [module.model.blocks[0].norm1.register_full_backward_hook(lambda *_: module.at("backward"))]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_exception_leaves_the_last_step(place: str, tmp_path: Path) -> None:
    """The same Trainer continues, and no gradient of the interrupted window is left.

    What is saved then, or by OnExceptionCheckpoint, resumes with the interrupted batch, to the bit.
    """
    remaining: list[Any] = []

    def scenario(make: Any, root: Path) -> Any:
        keeper = OnExceptionCheckpoint(root, filename="within")
        trainer = make(max_epochs=1, accumulate_grad_batches=1, callbacks=[keeper], enable_checkpointing=True)
        module, whole, resumed = Breaking(place), Everything(), [Everything(), Everything()]
        with pytest.raises(Broken):
            trainer.fit(module)
        (root / "within.ckpt").rename(root / "kept.ckpt")  # which the end of the next fit would remove
        trainer.save_checkpoint(root / "after.ckpt")
        module.place = None
        trainer.fit(module)
        for again, name in zip(resumed, ("kept", "after"), strict=True):
            make(max_epochs=1).fit(again, ckpt_path=root / f"{name}.ckpt")
        make(max_epochs=1).fit(whole)
        remaining[:] = [one.losses for one in (*resumed, whole)]
        return module.losses, trainer.global_step

    assert_like_plain_lightning(scenario, tmp_path)
    assert remaining[0] == remaining[1] == remaining[2][2:]  # of ours, which is run last


def test_one_callback_waits_for_a_disk(tmp_path: Path) -> None:
    """A callback whose save waited in vain, and which goes on, is the last that saves after an error.

    So it is if a second fit of the same Trainer fails before it is set up.
    """
    waits = Mock(side_effect=StorageTimeoutError("It hangs.", "Look for it."))

    def save(trainer: pl.Trainer, *_: Any) -> None:
        with suppress(StorageTimeoutError):
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    trainer = quiet_trainer(tmp_path, callbacks=[does(on_exception=save), does(on_exception=save)])
    trainer.strategy._fit_record.add_point = waits  # type: ignore[attr-defined]
    module: Any = Breaking("forward", step=1)
    for fits in (1, 2):
        with pytest.warns(UserWarning, match="No checkpoint is saved"), pytest.raises(Broken):
            trainer.fit(module)
        assert waits.call_count == fits
        module.prepare_data = Mock(side_effect=Broken)
    trainer.strategy.close()  # type: ignore[attr-defined]


def stores(folder: Path) -> list[str]:
    """Return the jobs whose state lies in a storage folder."""
    return sorted(path.parents[1].name for path in folder.rglob("state.bin"))


@pytest.mark.parametrize(
    ("settings", "step", "left"),
    [
        ({}, 2, [["default"], ["default", "default.aside"], ["default", "default.aside"], ["default.aside"]]),
        ({}, 0, [[], [], [], []]),
        pytest.param({"durability": "none"}, 2, [[], [], [], []], marks=pytest.mark.long),
        pytest.param({"keep": False}, 2, [[], [], [], []], marks=pytest.mark.long),
    ],
    ids=["after a step", "before any step", "one place", "keep=False"],
)
def test_what_is_left_of_broken_fits(
    settings: dict[str, Any], step: int, left: list[list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After close() no thread remains, and the state only if a fit can resume from it and would save a step.

    Fits that fail again and again leave the state of the last two; one that comes to its end leaves nothing of its own.
    """
    before = 0
    for number in range(4):
        strategy = SmartInfinityStrategy(tmp_path / "storage", transfer=settings)
        is_last = number == 3
        with nullcontext() if is_last else pytest.raises(Broken):
            quiet_trainer(tmp_path, strategy).fit(Everything() if is_last else Breaking("on_after_backward", step=step))
        strategy.close()
        assert stores(tmp_path / "storage") == left[number]
        if is_last:
            assert_threads_end(before)
        before = num_threads()  # the first fits also start threads of libraries, which stay
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum(
        "start the script again with trainer.fit(..., ckpt_path='storage')" in text for text in told
    ) == 3 * bool(left[0])
    assert sum("durability='none' leaves" in text for text in told) == 4 * ("durability" in settings)


class InterruptTheWait(pl.Callback):
    """A callback that slows storage down in the second step and sends Ctrl-C while the update is waited for."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self.parameters = [param.ds_tensor.clone() for param in pl_module.parameters()]
            testing.inject(optimizer.update.drained_handler()._device._pipeline, seed=1, max_delay_us=400_000)
            main: Any = threading.main_thread().ident
            self.timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
            self.timer.start()


GATHERS: list[tuple[Any, str]] = [
    (InflightParamRegistry, "__setitem__"),
    (partition_parameters.NoGatherCoalescedHandle, "wait"),
]


def test_ctrl_c_during_the_update_stops_the_step(tmp_path: Path) -> None:
    """Parameters equal those of the previous step bit for bit; its checkpoint and the Trainer go on."""
    settings: dict[str, Any] = {"use_distributed_sampler": False, "max_steps": 3}
    interrupt, module = InterruptTheWait(), Everything()
    slow = {"overlap": "none", "transfer": {"tasklet_bytes": 64 * 1024, "num_buffers": 2}}
    trainer = quiet_trainer(tmp_path, callbacks=[interrupt], **settings, **slow)
    with pytest.raises(SystemExit):
        trainer.fit(module)
    join(interrupt.timer)
    handler = trainer.strategy.optimizers[0].update.drained_handler()
    assert handler.generation == 1 and not handler.in_flight
    for param, before in zip(module.parameters(), interrupt.parameters, strict=True):
        assert torch.equal(param.ds_tensor, before)  # type: ignore[attr-defined]
    trainer.save_checkpoint(tmp_path / "interrupted.ckpt")
    resumed = quiet_trainer(tmp_path / "again", **settings)
    resumed.fit(Everything(), ckpt_path=tmp_path / "interrupted.ckpt")
    trainer.callbacks.remove(interrupt)  # type: ignore[attr-defined]
    trainer.fit(module)
    assert trainer.global_step == resumed.global_step == 3


@pytest.mark.parametrize(
    ("owner", "call", "overlap"),
    long_but(
        [(*GATHERS[0], "none"), (*GATHERS[1], "forward")],
        [(*gather, overlap) for gather in GATHERS for overlap in ("none", "forward")],
    ),
)
def test_ctrl_c_while_parameters_are_gathered(
    owner: Any, call: str, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C at the start or the wait of a gather the state can be saved, and the same Trainer continues."""
    module = Everything()
    strategy = SmartInfinityStrategy(
        tmp_path / "storage", overlap=overlap, zero={"stage3_param_persistence_threshold": 0}
    )
    trainer = quiet_trainer(tmp_path, strategy, use_distributed_sampler=False, max_steps=3)
    gather, interrupts = getattr(owner, call), iter([KeyboardInterrupt])

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if trainer.global_step == 1:
            for interrupt in interrupts:
                raise interrupt
        return gather(*arguments, **options)

    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(SystemExit):
        trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "interrupted.ckpt")
    trainer.fit(module)
    resumed = quiet_trainer(tmp_path / "again", use_distributed_sampler=False, max_steps=3)
    resumed.fit(Everything(), ckpt_path=tmp_path / "interrupted.ckpt")
    assert trainer.global_step == resumed.global_step == 3


def test_a_module_whose_set_up_failed_can_be_fitted(tmp_path: Path) -> None:
    """A failed set-up leaves no trace on the module, whether the storage or the optimizer was refused."""
    (tmp_path / "file").write_text("in the way")
    expected, module = Everything(), Everything()
    fit(expected, tmp_path / "expected")
    with pytest.raises(StorageError):
        fit(module, tmp_path, SmartInfinityStrategy(tmp_path / "file" / "below"))
    configure = module.configure_optimizers
    module.configure_optimizers = lambda: torch.optim.Rprop(module.parameters())  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError):
        fit(module, tmp_path)
    module.configure_optimizers = configure  # type: ignore[method-assign]
    fit(module, tmp_path / "at last")
    assert module.losses == expected.losses

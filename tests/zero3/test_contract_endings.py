"""Tests the private parts of the installed Lightning and torch by which trainings of several ranks end."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from lightning.pytorch.utilities.exceptions import SIGTERMException
from transformers import GenerationMixin
from transformers.integrations import is_fsdp_managed_module

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.parameters import module_copies
from lightning_smartinfinity.zero3.ranks.locations import _counts, _kind_of, _params_in
from lightning_smartinfinity.zero3.ranks.watchdog import _is_of_collective
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer


@pytest.mark.seam("SIGTERM is told to all ranks by the watch, not by a collective")
def test_the_connector_looks_up_its_handler_of_sigterm_on_itself(tmp_path: Path) -> None:
    """Trainer._signal_connector looks _sigterm_notifier_fn up on the instance when it registers handlers."""
    trainer = quiet_trainer(tmp_path, "auto")
    heard: list[Any] = []
    trainer._signal_connector._sigterm_notifier_fn = lambda *arguments: heard.append(arguments)  # type: ignore[assignment]
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer._signal_connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
    finally:
        trainer._signal_connector.teardown()
        signal.signal(signal.SIGTERM, before)
    assert len(heard) == 1


@pytest.mark.seam("`end_by` raises an error that names the lost rank instead of a collective's")
def test_an_error_ends_in_teardown_after_on_exception(tmp_path: Path) -> None:
    """Strategy.on_exception may replace an error, before Trainer._teardown ends signals, loops and strategy."""
    trainer = quiet_trainer(tmp_path, "auto")
    torn = []

    def on_exception(exception: BaseException) -> None:
        assert str(exception) == "theirs"
        trainer._teardown()
        torn.append(True)
        raise KeyError("ours") from exception

    trainer.strategy.on_exception = on_exception  # type: ignore[method-assign]
    module = LitTiny(Recipe())

    def fail() -> None:
        raise ValueError("theirs")

    module.on_train_start = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="ours"):
        trainer.fit(module)
    assert torn == [True]


@pytest.mark.seam("all ranks end after the same batch")
def test_ranks_learn_at_the_start_of_a_batch_what_rank_0_received(tmp_path: Path) -> None:
    """_TrainingEpochLoop._broadcast_sigterm_tensor sends rank 0's received_sigterm, and raises SIGTERMException."""
    assert on_ranks(ended_in_the_second_batch, tmp_path) == [[0, 1], [0, 1]]


def ended_in_the_second_batch(folder: Path) -> list[int]:
    """Ask rank 0 to end in the second batch, by the attribute that its signal handler sets; return what was begun."""
    trainer = quiet_trainer(folder, "ddp", devices=2, precision="32-true", max_steps=10)
    loop: Any = trainer.fit_loop.epoch_loop
    calls = []

    def broadcast() -> None:
        calls.append(trainer.global_step)
        if trainer.global_rank == 0 and trainer.global_step == 1:
            trainer._signal_connector.received_sigterm = True
        type(loop)._broadcast_sigterm_tensor(loop)

    loop._broadcast_sigterm_tensor = broadcast
    with pytest.raises(SIGTERMException):
        trainer.fit(LitTiny(Recipe()))
    return calls


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "gather": lambda one: dist.all_gather_into_tensor(one.new_empty(2), one, async_op=True).wait(),
    "reduction": dist.all_reduce,
    "broadcast": lambda one: dist.broadcast(one, 0),
    "barrier": lambda _: dist.barrier(),
}


@pytest.mark.seam("where a rank waits for others, and whether for the same collective, without an exchange")
@pytest.mark.seam("`lost_rank_behind` recognises a collective that misses a rank", "The error of gloo names it.")
def test_every_collective_waits_and_counts(tmp_path: Path) -> None:
    """Torch, Lightning and DeepSpeed wait for collectives by torch.distributed.Work.wait; Work._get_op_type is a
    torch._C._distributed_c10d.OpType, and groups of distributed_c10d._world.pg_map count:
    ProcessGroup._get_sequence_number_for_group. A collective that misses a rank raises a plain RuntimeError.
    """
    (kinds, counted, error), _ = on_ranks(waited_for, tmp_path)
    assert (kinds, counted) == (list(COLLECTIVES), len(COLLECTIVES))
    assert error is True, "the error of a collective that misses a rank is another one"


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


def waited_for(_: Path) -> tuple[list[str], int, bool | None]:
    """Run collectives; return those waited for, those counted, and on rank 0 whether a lost rank is told by gloo."""
    dist.init_process_group("gloo")
    dist.new_group()
    kinds: list[str] = []

    def wait(original: Callable[..., bool], work: dist.Work, *args: Any) -> bool:
        kinds.append(_kind_of(work))
        return original(work, *args)

    before = _counts()
    assert len(before) == 2
    with wrapped(dist.Work, "wait", wait):
        for run in COLLECTIVES.values():
            run(torch.ones(1))
    counted = sum(_counts().values()) - sum(before.values())
    if dist.get_rank() == 1:
        return kinds, counted, None
    with pytest.raises(RuntimeError) as caught:
        reduce_for_ever()  # rank 1 ends now
    return kinds, counted, _is_of_collective(caught.value)


@pytest.mark.seam("errors that name them")
@pytest.mark.parametrize("name", ["AllGatherHandle", "AllGatherCoalescedHandle"])
def test_handles_of_gathers_hold_their_parameters(name: str) -> None:
    """Attributes of DeepSpeed's handles of gathers, and locals of its functions, hold parameters and modules."""
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_status = partition_parameters.ZeroParamStatus.INFLIGHT  # type: ignore[attr-defined]
    arguments = {"handle": None, "param": param, "allgather_handle": None, "params": [param], "partitions": []}
    kind = getattr(partition_parameters, name)
    taken = [one.name for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    handle = kind(**{argument: arguments.get(argument) for argument in taken})
    assert param in set(_params_in(handle))


@pytest.mark.seam("ranks that generate texts of different lengths")
def test_generate_asks_a_mark_of_the_model() -> None:
    """GenerationMixin.generate takes synced_gpus from is_fsdp_managed_module, by a model's _is_fsdp_managed_module."""
    assert inspect.signature(GenerationMixin.generate).parameters["synced_gpus"].default is None
    assert "is_fsdp_managed_module(self)" in inspect.getsource(sys.modules[GenerationMixin.__module__])
    module: Any = torch.nn.Linear(1, 1)
    assert not is_fsdp_managed_module(module)
    setattr(module, module_copies._MARK, True)
    assert is_fsdp_managed_module(module)

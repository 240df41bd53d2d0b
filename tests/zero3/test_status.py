"""The class of a parameter follows its status: a step runs none of the code that answers user code."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from lightning_smartinfinity import SmartInfinityFabricStrategy, UnsupportedError
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import refuse_foreign_steps
from lightning_smartinfinity.zero3.parameters import callers, partitioned_parameter
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper
from lightning_smartinfinity.zero3.parameters.status import forget_classes


@pytest.mark.parametrize("threshold", [0, 10**6], ids=["partitioned", "kept whole"])
def test_a_step_runs_no_answering_code(tmp_path: Path, threshold: int) -> None:
    """Neither forward nor backward, step or zero_grad calls a function of the modules that answer user code.

    Classes that were left with plain attributes are restored when the engine runs again.
    """
    zero = {"stage3_param_persistence_threshold": threshold}
    strategy = SmartInfinityFabricStrategy(tmp_path, overlap="none", zero=zero)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    answered: list[str] = []
    files = {callers.__file__, partitioned_parameter.__file__}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            answered.append(frame.f_code.co_qualname)

    def step() -> None:
        fabric.backward(model(torch.randn(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert answered == []
    assert float(net[0].weight.norm()) > 0
    classes = [type(param) for param in net.parameters()]
    forget_classes(net.parameters())  # as Ctrl-C within a gather may leave them
    assert [type(param) for param in net.parameters()] != classes
    end_gathers(net)
    assert [type(param) for param in net.parameters()] == classes
    strategy.close()


# ---- gathers that Ctrl-C interrupted halfway are ended


class Handle:
    """A handle of a gather, whose ``wait`` may fail."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses, self.waited = refuses, False

    def wait(self) -> None:
        self.waited = True
        assert not self.refuses


def test_gathers_are_waited_for_or_forgotten() -> None:
    """Afterwards no gather is in flight, and a parameter that was in flight counts as not gathered."""
    module: Any = torch.nn.Linear(2, 2)
    handles = [Handle(refuses=True), Handle(refuses=False)]
    module.ds_inflight_param_registry = dict(enumerate(handles))
    module.weight.ds_status, module.bias.ds_status = ZeroParamStatus.INFLIGHT, ZeroParamStatus.AVAILABLE
    end_gathers(module)
    assert all(handle.waited for handle in handles) and not module.ds_inflight_param_registry
    assert module.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    assert module.bias.ds_status is ZeroParamStatus.AVAILABLE and module.bias.numel() == 2


# ---- optimizers of others may step parameters of their own, and none that ZeRO-3 has partitioned


@pytest.mark.parametrize("comes_late", [False, True])
def test_steps_of_partitioned_parameters_are_refused(comes_late: bool) -> None:
    """An optimizer that was accepted is looked at again when it has more parameters, or there is a new engine."""
    refuse_foreign_steps()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(params[:2] if comes_late else params, lr=0.1)
    for _ in range(2):
        optimizer.step()
    params[2].ds_status, params[2].ds_shape = None, (2,)  # type: ignore[attr-defined]
    if comes_late:
        optimizer.add_param_group({"params": params[2:]})
    else:
        refuse_foreign_steps()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="ZeRO-3"):
            optimizer.step()


# ---- writing of parameters ends whole, whatever fails on the way


FULL = StorageError("The disk is full.", "Free some space.")


@pytest.mark.parametrize(
    ("starts", "ends", "raised", "awaited"),
    [({2: FULL}, {}, StorageError, [0, 1]), ({}, {0: FULL, 1: KeyboardInterrupt()}, KeyboardInterrupt, [0, 1, 2])],
    ids=["a write that cannot be started", "an interrupt among writes"],
)
def test_writes_that_were_started_are_finished(
    starts: dict[int, BaseException],
    ends: dict[int, BaseException],
    raised: type[BaseException],
    awaited: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They release their memory whichever start or end fails, and an interrupt is what is raised."""
    finished: list[int] = []

    def start(param: int) -> int:
        if param in starts:
            raise starts[param]
        return param

    def finish(ticket: int) -> None:
        finished.append(ticket)
        if ticket in ends:
            raise ends[ticket]

    settings: Any = SimpleNamespace()
    swapper: Any = ParameterSwapper(settings)
    monkeypatch.setattr(swapper, "_store", SimpleNamespace(finish=finish))
    monkeypatch.setattr(swapper, "_together", nullcontext)
    monkeypatch.setattr(swapper, "_start_write", start)
    monkeypatch.setattr(swapper, "remove_partition_and_release_buffers", lambda params: None)
    with pytest.raises(raised):
        swapper.swap_out_and_release([0, 1, 2])
    assert finished == awaited

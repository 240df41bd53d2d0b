"""A speculative update asks the layout for a parameter only when its gradient has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation

NUM_PARAMETERS = 1000


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """A growing list of the parameters whose tasklets somebody asked for."""
    calls: list[slice] = []
    tasklets_of = PartitionLayout.tasklets_of

    def counted(self: PartitionLayout, parameters: slice) -> range:
        calls.append(parameters)
        return tasklets_of(self, parameters)

    monkeypatch.setattr(PartitionLayout, "tasklets_of", counted)
    return calls


class Param:
    """A stand-in for a ZeRO-3 parameter that counts how often somebody asks whether a module uses it."""

    num_looks = 0

    def __init__(self, index: int, *, active: bool) -> None:
        self.ds_id, self.ds_status, self.active = index, None, active

    @property
    def ds_active_sub_modules(self) -> set[int]:
        Param.num_looks += 1
        return {0} if self.active else set()


def test_a_window_costs_what_arrives_in_it(asked: list[slice]) -> None:
    """A window asks nothing when it begins and once for each gradient; a release looks only at parameters that wait."""
    layout = build_layout(
        [ParameterSlice(name="", numel=100, real_numel=100, group=0, sub_group=0) for _ in range(NUM_PARAMETERS)],
        tasklet_bytes=64 * 1024,
        num_arrays=3,
        num_devices=1,
        places_per_tasklet=2,
    )
    handler = MagicMock()
    rank_state = SimpleNamespace(
        handler=handler,
        partition=SimpleNamespace(layout=layout, index={index: index for index in range(NUM_PARAMETERS)}),
        roll_back=lambda reason: None,
    )
    speculation = Speculation(cast(RankState, rank_state))
    params: list[Any] = [Param(index, active=index == 7) for index in range(NUM_PARAMETERS)]
    for _ in range(2):
        asked.clear()
        handler.reset_mock()
        speculation.discard()
        speculation.begin(cast(StepPlan, SimpleNamespace()), binds=False)
        assert not asked
        speculation.arrived(params)
        assert len(asked) == NUM_PARAMETERS - 1
        ((opened,),) = [call.args for call in handler.step.extend.call_args_list]
        assert opened == list(range(1, layout.extents.num_tasklets))
        looks = Param.num_looks
        speculation.begin_ready()
        assert Param.num_looks == looks + 1
        params[7].active = False
        speculation.begin_ready()
        assert handler.step.extend.call_args.args == ([0],)
        params[7].active = True
        looks = Param.num_looks
        speculation.begin_ready()
        assert Param.num_looks == looks

"""A speculative update begins a tasklet when all of its gradients have come and no module uses its parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation

NUM_PARAMETERS = 1000


def test_a_window_costs_what_arrives_in_it() -> None:
    """A window asks the layout nothing when it begins, and once for each gradient of a parameter that is not in use."""
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
    params: list[Any] = [
        SimpleNamespace(ds_id=index, ds_status=None, ds_active_sub_modules={0} if index == 7 else set())
        for index in range(NUM_PARAMETERS)
    ]
    for _ in range(2):
        handler.reset_mock()
        with patch.object(
            PartitionLayout, "tasklets_of", autospec=True, side_effect=PartitionLayout.tasklets_of
        ) as asked:
            speculation.discard()
            speculation.begin(cast(StepPlan, SimpleNamespace()), binds=False)
            assert not asked.called
            speculation.arrived(params)
            assert asked.call_count == NUM_PARAMETERS - 1
        ((opened,),) = [call.args for call in handler.step.extend.call_args_list]
        assert opened == list(range(1, layout.extents.num_tasklets))
        speculation.begin_ready()
        assert handler.step.extend.call_count == 1
        params[7].ds_active_sub_modules = set()
        speculation.begin_ready()
        assert handler.step.extend.call_args.args == ([0],)
        params[7].ds_active_sub_modules = {0}

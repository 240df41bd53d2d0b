"""Adagrad, SGD and RMSprop through the handler: results like torch.optim's, and their state on storage.

The tolerance is that of test_handler.py, but 1e-6 absolute, since a buffer of gradients is several times as large.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.pipeline.state.convert import convert_store
from tests.native.fake_cuda import FakeCuda
from tests.pipeline.fake_link import CudaRun, FakeLink
from tests.pipeline.harness import Case, Run, assert_equal, gradient_of, running

NUM_STEPS = 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ADAGRAD = Case(optimizer=torch.optim.Adagrad, options=({"lr": 1e-2, "weight_decay": 0.05}, {"lr": 3e-3, "eps": 1e-3}))
SGD = Case(
    optimizer=torch.optim.SGD, options=({"lr": 1e-2, "weight_decay": 0.05}, {"lr": 3e-3}), defaults={"momentum": 0.9}
)


def with_options(case: Case, first: dict[str, Any], second: dict[str, Any]) -> Case:
    return case.but(options=({**case.options[0], **first}, {**case.options[1], **second}))


RMSPROP = Case(optimizer=torch.optim.RMSprop, options=({"lr": 1e-2}, {"lr": 3e-3, "alpha": 0.4}))

CASES = {
    "adagrad": ADAGRAD,
    "adagrad with everything": with_options(ADAGRAD, {"lr_decay": 0.1}, {"maximize": True}).but(
        defaults={"initial_accumulator_value": 0.1}
    ),
    "sgd": SGD,
    "sgd with dampening": with_options(SGD, {"dampening": 0.3}, {"maximize": True}),
    "sgd with nesterov": with_options(SGD, {"nesterov": True}, {"nesterov": True, "momentum": 0.5}),
    "sgd without momentum": with_options(SGD, {"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.5}),
    # The second group is always plain, so it keeps fewer arrays than the first.
    **{
        f"rmsprop with {settings}": with_options(RMSPROP, settings, {})
        for settings in (
            {"momentum": momentum, "centered": centered, "weight_decay": weight_decay, "maximize": maximize}
            for momentum in (0.0, 0.9)
            for centered in (False, True)
            for weight_decay in (0.0, 0.05)
            for maximize in (False, True)
        )
    },
}


def begin_momentum(run: Run, number: int) -> None:
    """Switch momentum on from the fourth step."""
    run.optimizer.param_groups[0]["momentum"] = 0.0 if number < 3 else 0.8


def assert_follows_torch(run: Run, before_step: Callable[[Run, int], object] = lambda run, number: None) -> None:
    """Assert that masters, arrays and step counts are torch's, wherever torch has them."""
    for number in range(NUM_STEPS):
        before_step(run, number)
        run.step(number)
        run.optimizer.step()
    for index, parameter in enumerate(run.parameters):
        state, arrays = run.optimizer.state[parameter], run.handler.state.read_parameter(index)
        expected = {
            "master": parameter.detach(),
            **{name: state[name] for name in run.case.rule.arrays if name in state},
        }
        # RMSprop's buffer sums gradients divided by their root mean square. The first quotient is ten.
        absolute = 1e-5 if isinstance(run.optimizer, torch.optim.RMSprop) else 1e-6
        for name, values in expected.items():
            torch.testing.assert_close(torch.from_numpy(arrays[name]), values, rtol=1e-6, atol=absolute)
        (group,) = (group for group in run.optimizer.param_groups if any(p is parameter for p in group["params"]))
        has_state = run.case.rule.holds_state(int(run.handler.steps[index]))
        assert {*expected} == {"master", *(run.case.rule.kept_arrays([group]) if has_state else ())}
        if "step" in state:
            assert run.handler.steps[index] == state["step"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_follows_torch(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Results follow torch through groups, schedules, scaling and skipped parameters."""
    with running(tmp_path, CASES[name].but(dtype=dtype)) as run:
        assert_follows_torch(run)


def test_momentum_that_begins_later(tmp_path: Path) -> None:
    """As in torch, the first step with momentum starts the buffer with its undamped gradient."""
    with running(tmp_path, with_options(SGD, {"dampening": 0.3}, {})) as run:
        assert_follows_torch(run, begin_momentum)


def test_momentum_that_pauses_begins_anew(tmp_path: Path) -> None:
    """Momentum that is switched off and on starts a new buffer, unlike in torch, which keeps the old one.

    The buffer on storage has been overwritten meanwhile.
    """
    case = with_options(SGD, {"weight_decay": 0.0}, {}).but(shapes=((1_000, 0, 0, 0),))
    with running(tmp_path, case) as run:
        for number, momentum in ((1, 0.9), (2, 0.0), (4, 0.9)):
            run.optimizer.param_groups[0]["momentum"] = momentum
            run.step(number)
        assert run.handler.steps.tolist() == [1]
        buffer = torch.from_numpy(run.handler.state.read_parameter(0)["momentum_buffer"])
        assert torch.equal(buffer, gradient_of(case, 0, 4))


@pytest.mark.parametrize("name", ["adagrad with everything", "sgd", list(CASES)[-1]])
def test_staged_partitions_give_the_same_bits(tmp_path: Path, name: str) -> None:
    """Staged parameters are updated like those in host memory."""
    states = []
    for staged in (False, True):
        with running(
            tmp_path / str(staged), CASES[name].but(dtype=torch.bfloat16, staged=staged, num_buffers=2)
        ) as run:
            run.steps(range(3))
            states.append(run.state())
    assert_equal(*states)


def test_sums_begin_with_the_initial_value(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """Adagrad's sums start with the initial value, in host memory, staged and on a device.

    They do so again when the state is initialized again.
    """
    case = CASES["adagrad with everything"].but(dtype=torch.bfloat16, num_buffers=2)
    link = FakeLink(fake_cuda)
    runs = [Run(tmp_path / "host", case), Run(tmp_path / "staged", case.but(staged=True))]
    for run in (*runs, CudaRun(tmp_path / "device", case, link)):
        for _ in range(2):
            state = run.state()
            assert torch.equal(state["master"], state["partition"].float())
            assert torch.equal(state["sum"], torch.full_like(state["sum"], 0.1))
            run.step(1)
            assert not torch.equal(run.state()["sum"], state["sum"])
            run.initialize()
        run.close()
    link.close()


@pytest.mark.parametrize("case", [ADAGRAD, SGD, RMSPROP], ids=["adagrad", "sgd", "rmsprop"])
def test_traffic(tmp_path: Path, case: Case) -> None:
    """A 32-true step writes all arrays and reads all but the master. A 16-bit step reads and writes all."""
    numel, trailer, state_bytes = 16_384, 4096, 4 * len(case.rule.arrays)
    for dtype, read_bytes in ((torch.float32, state_bytes - 4), (torch.bfloat16, state_bytes)):
        one = case.but(dtype=dtype, shapes=((numel, 0, 0, 0),), tasklet_bytes=1 << 20)
        with running(tmp_path / str(dtype), one) as run:
            before = run.handler.traffic()
            run.step(1)
            after = run.handler.traffic()
            assert after.shared_read_bytes - before.shared_read_bytes == read_bytes * numel + trailer
            assert after.shared_write_bytes - before.shared_write_bytes == state_bytes * numel + trailer


@pytest.mark.parametrize("case", [ADAGRAD, SGD, RMSPROP], ids=["adagrad", "sgd", "rmsprop"])
def test_kept_state_is_converted_to_fp32_only(tmp_path: Path, case: Case) -> None:
    """Formats that round Adam's moments are refused. Converting to other tasklets keeps every bit."""
    run = Run(tmp_path, case)
    run.steps(range(2))
    state = run.state()
    run.close(remove=False)
    with pytest.raises(UnsupportedError, match=f"{case.rule.name}: it is for Adam or AdamW alone"):
        convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="int8")
    convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="fp32", tasklet_bytes=100_000)
    with running(tmp_path / "new", case.but(tasklet_bytes=100_000), recover=True) as found:
        assert_equal({**found.state(), "partition": state["partition"]}, state)

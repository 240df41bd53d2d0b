"""Every update rule through the handler: results like torch.optim's, and its state on storage.

ATen contracts multiplications and additions, and divides where the native core multiplies by an inverse, so results
differ by a few units in the last place per step. After eight steps a relative 1e-6 and an absolute 1e-7 (of parameters
of about 1) are allowed. It is 1e-6 absolute where a buffer of gradients is several times as large, and 1e-5 for
RMSprop, whose buffer sums gradients divided by their root mean square; the first quotient is ten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.pipeline.state.convert import convert_store
from tests.pipeline.harness import Case, Run, assert_equal, gradient_of, running

NUM_STEPS = 8
BF16, FP16 = torch.bfloat16, torch.float16


def case_of(
    optimizer: type[torch.optim.Optimizer], first: dict[str, Any], second: dict[str, Any], **others: Any
) -> Case:
    """Return a case whose groups have these options and learning rates of their own."""
    return Case(optimizer=optimizer, options=({"lr": 1e-2, **first}, {"lr": 3e-3, **second}), **others)


ADAM, ADAGRAD, SGD, RMSPROP = torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD, torch.optim.RMSprop
DECAY = {"weight_decay": 0.05}
MOMENTUM = {"momentum": 0.9}

CASES = {
    "adamw": Case(),
    "adamw in bf16": Case(dtype=BF16),
    "adamw in fp16": Case(dtype=FP16),
    "adam": case_of(ADAM, DECAY, {"betas": (0.8, 0.99), "maximize": True}, dtype=FP16),
    "adam with decoupled decay": case_of(
        ADAM, DECAY | {"decoupled_weight_decay": True}, {"lr": 0.0, "betas": (0.3, 0.0)}, dtype=BF16
    ),
    "adagrad": case_of(ADAGRAD, DECAY, {"eps": 1e-3}, dtype=BF16),
    "adagrad with everything": case_of(
        ADAGRAD,
        DECAY | {"lr_decay": 0.1},
        {"eps": 1e-3, "maximize": True},
        defaults={"initial_accumulator_value": 0.1},
    ),
    "sgd": case_of(SGD, DECAY, {}, defaults=MOMENTUM),
    "sgd with dampening": case_of(SGD, DECAY | {"dampening": 0.3}, {"maximize": True}, defaults=MOMENTUM, dtype=FP16),
    "sgd with momentum that begins later": case_of(SGD, DECAY | {"dampening": 0.3}, {}, defaults=MOMENTUM),
    "sgd with nesterov": case_of(
        SGD, DECAY | {"nesterov": True}, {"nesterov": True, "momentum": 0.5}, defaults=MOMENTUM, dtype=BF16
    ),
    "sgd without momentum": case_of(SGD, DECAY | {"momentum": 0.0, "dampening": 0.5}, {"momentum": 0.5}),
    # The second group is always plain, so it keeps fewer arrays than the first.
    "rmsprop": case_of(RMSPROP, {}, {"alpha": 0.4}, dtype=FP16),
    "rmsprop with decay": case_of(RMSPROP, DECAY | {"maximize": True}, {"alpha": 0.4}),
    "rmsprop with momentum": case_of(RMSPROP, MOMENTUM | {"maximize": True}, {"alpha": 0.4}, dtype=BF16),
    "rmsprop, centered": case_of(RMSPROP, DECAY | {"centered": True}, {"alpha": 0.4}),
    "rmsprop with everything": case_of(
        RMSPROP, MOMENTUM | DECAY | {"centered": True, "maximize": True}, {"alpha": 0.4}
    ),
}


def tolerance_of(optimizer: torch.optim.Optimizer) -> float:
    return 1e-7 if isinstance(optimizer, ADAM) else 1e-5 if isinstance(optimizer, RMSPROP) else 1e-6


def assert_follows_torch(run: Run, *, late_momentum: bool) -> None:
    """Assert that masters, arrays and step counts are torch's, wherever torch has them, and that padding stays zero."""
    for number in range(NUM_STEPS):
        if late_momentum:
            run.optimizer.param_groups[0]["momentum"] = 0.0 if number < 3 else 0.8
        run.step(number)
        run.optimizer.step()
    partition = run.state()["partition"]
    for index, parameter in enumerate(run.parameters):
        state, arrays = run.optimizer.state[parameter], run.handler.state.read_parameter(index)
        expected = {
            "master": parameter.detach(),
            **{name: state[name] for name in run.case.rule.arrays if name in state},
        }
        for name, values in expected.items():
            found, atol = torch.from_numpy(arrays[name]), tolerance_of(run.optimizer)
            torch.testing.assert_close(found, values, rtol=1e-6, atol=atol)
        (group,) = (group for group in run.optimizer.param_groups if any(p is parameter for p in group["params"]))
        has_state = run.case.rule.holds_state(int(run.handler.steps[index]))
        assert {*expected} == {"master", *(run.case.rule.kept_arrays([group]) if has_state else ())}
        if "step" in state:
            assert run.handler.steps[index] == state["step"]
        where = run.layout.parameters[index]
        assert not partition[where.offset + where.real_numel : where.offset + where.numel].any()


@pytest.mark.parametrize("name", CASES)
def test_follows_torch(tmp_path: Path, name: str) -> None:
    """Results follow torch through groups, schedules, scaling and skipped parameters.

    As in torch, the first step with momentum starts the buffer with its undamped gradient.
    """
    with running(tmp_path, CASES[name]) as run:
        assert_follows_torch(run, late_momentum="later" in name)


def test_momentum_that_pauses_begins_anew(tmp_path: Path) -> None:
    """Momentum that is switched off and on starts a new buffer, unlike in torch, which keeps the old one.

    The buffer on storage has been overwritten meanwhile.
    """
    case = case_of(SGD, {}, {}, defaults=MOMENTUM, shapes=((1_000, 0, 0, 0),))
    with running(tmp_path, case) as run:
        for number, momentum in ((1, 0.9), (2, 0.0), (4, 0.9)):
            run.optimizer.param_groups[0]["momentum"] = momentum
            run.step(number)
        assert run.handler.steps.tolist() == [1]
        buffer = torch.from_numpy(run.handler.state.read_parameter(0)["momentum_buffer"])
        assert torch.equal(buffer, gradient_of(case, 0, 4))


@pytest.mark.parametrize("name", ["adagrad", "sgd", "rmsprop"])
def test_kept_state_is_converted_to_fp32_only(tmp_path: Path, name: str) -> None:
    """Formats that round Adam's moments are refused. Converting to other tasklets keeps every bit."""
    case = CASES[name]
    run = Run(tmp_path, case)
    run.steps(range(2))
    state = run.state()
    run.close(remove=False)
    with pytest.raises(UnsupportedError, match=f"{case.rule.name}: it is for Adam or AdamW alone"):
        convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="int8")
    convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="fp32", tasklet_bytes=100_000)
    with running(tmp_path / "new", case.but(tasklet_bytes=100_000), recover=True) as found:
        assert_equal({**found.state(), "partition": state["partition"]}, state)

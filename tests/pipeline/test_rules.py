"""Update rules: the supported optimizers and the use of their hyperparameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.state.convert import convert_store
from tests.pipeline.harness import Case, assert_equal, gradient_of, running
from tests.pipeline.test_convert import kept


class HomemadeAdamW(torch.optim.AdamW):
    """A subclass of a supported optimizer, which might step differently."""


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


ARRAYS = {
    torch.optim.Adam: ("master", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("master", "exp_avg", "exp_avg_sq"),
    torch.optim.Adagrad: ("master", "sum"),
    torch.optim.SGD: ("master", "momentum_buffer"),
    torch.optim.RMSprop: ("master", "square_avg", "momentum_buffer", "grad_avg"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_supported_optimizers(kind: type[torch.optim.Optimizer]) -> None:
    """A supported optimizer is recognised by its exact type, and its state has torch's names."""
    rule = rule_for(kind(parameters()))
    assert (rule.name, rule.arrays) == (kind.__name__, ARRAYS[kind])


class HomemadeOptimizer(torch.optim.Optimizer):
    """An optimizer that is not in torch."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_setting_tells_an_optimizer_from_the_others(kind: type[torch.optim.Optimizer]) -> None:
    """A checkpoint's groups are recognised by a setting that no optimizer with another rule has."""
    rule = rule_for(kind(parameters(), lr=0.1))
    others = [other(parameters(), lr=0.1) for other in ARRAYS]
    having = [other for other in others if rule.distinctive_setting in other.defaults]
    assert {rule_for(other).description for other in having} == {rule.description}


@pytest.mark.parametrize("kind", [HomemadeAdamW, HomemadeOptimizer, torch.optim.Adamax])
def test_other_optimizers(kind: type[torch.optim.Optimizer]) -> None:
    """Other optimizers are refused by name, with a list of the supported ones."""
    with pytest.raises(UnsupportedError, match=kind.__name__) as caught:
        rule_for(kind(parameters(), lr=0.1))
    *names, last = (kind.__name__ for kind in ARRAYS)
    assert caught.value.remedy == f"Use one of torch.optim's {', '.join(names)} and {last}."
    assert ("a subclass of" in caught.value.problem) == (kind is HomemadeAdamW)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([{"params": parameters()}, {"params": parameters(), "amsgrad": True}], "amsgrad=True"),
        ([{"params": [torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))]}], "complex64"),
    ],
)
def test_what_has_other_state(groups: list[dict[str, Any]], told: str) -> None:
    """The setting amsgrad needs a fourth array, in whichever group; parameters must be real floating point."""
    with pytest.raises(UnsupportedError, match=told):
        rule_for(torch.optim.AdamW(groups))


def test_choices_of_implementation_are_ignored() -> None:
    """foreach, fused and capturable do not change the result and are ignored. differentiable=True warns."""
    rule = rule_for(torch.optim.AdamW(parameters(), foreach=True))
    assert rule.snapshot(torch.optim.AdamW(parameters(), fused=True).param_groups[0]) == rule.snapshot(
        torch.optim.AdamW(parameters(), capturable=True).param_groups[0]
    )
    with pytest.warns(UserWarning, match="differentiable=True"):
        rule_for(torch.optim.AdamW(parameters(), differentiable=True))


def test_first_values() -> None:
    """Arrays start with zeros. Adagrad's starts with the value given to its constructor, not to its groups."""
    for kind in ARRAYS:
        assert set(rule_for(kind(parameters())).first_values(kind(parameters()).defaults)) == {0.0}
    optimizer = torch.optim.Adagrad(
        [{"params": parameters(), "initial_accumulator_value": 9.0}], initial_accumulator_value=0.25
    )
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["sum"].tolist() == [0.25] * 3
    assert rule_for(optimizer).first_values(optimizer.defaults) == (0.25,)
    optimizer.defaults["initial_accumulator_value"] = -1.0
    with pytest.raises(ConfigError, match="initial_accumulator_value"):
        rule_for(optimizer)


def test_tensor_hyperparameters() -> None:
    """Tensors with one element are accepted as hyperparameters."""
    optimizer = torch.optim.AdamW(
        parameters(), lr=torch.tensor(0.01, dtype=torch.float64), betas=(torch.tensor(0.5), torch.tensor(0.25))
    )
    snapshot = rule_for(optimizer).snapshot(optimizer.param_groups[0])
    assert (snapshot.lr, snapshot.beta1, snapshot.beta2) == (0.01, 0.5, 0.25)  # type: ignore[attr-defined]


def test_decoupled_weight_decay_of_a_group() -> None:
    """The group's decoupled_weight_decay decides. Without it, as in older torch, the optimizer's type decides."""
    for kind, decoupled in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        optimizer = kind(parameters())
        rule, group = rule_for(optimizer), dict(optimizer.param_groups[0])
        assert rule.snapshot(group).decoupled_weight_decay is decoupled  # type: ignore[attr-defined]
        group["decoupled_weight_decay"] = not decoupled
        assert rule.snapshot(group).decoupled_weight_decay is not decoupled  # type: ignore[attr-defined]
        del group["decoupled_weight_decay"]
        assert rule.snapshot(group).decoupled_weight_decay is decoupled  # type: ignore[attr-defined]


OUT_OF_RANGE = [
    *((torch.optim.Adam, "lr", value) for value in (math.nan, -0.1, math.inf, "fast", torch.zeros(2))),
    (torch.optim.Adam, "eps", -1e-9),
    (torch.optim.Adam, "weight_decay", math.nan),
    (torch.optim.Adam, "betas", (1.0, 0.9)),
    (torch.optim.Adam, "betas", (0.9, -0.1)),
    (torch.optim.Adagrad, "lr_decay", -0.1),
    (torch.optim.Adagrad, "lr", 10**400),
    (torch.optim.Adagrad, "eps", math.nan),
    (torch.optim.Adagrad, "weight_decay", -1.0),
    (torch.optim.SGD, "momentum", -0.1),
    (torch.optim.SGD, "momentum", math.inf),
    (torch.optim.SGD, "dampening", math.nan),
    (torch.optim.SGD, "dampening", -math.inf),
    (torch.optim.SGD, "weight_decay", "much"),
    (torch.optim.RMSprop, "alpha", -0.1),
    (torch.optim.RMSprop, "momentum", math.nan),
]


@pytest.mark.parametrize(("kind", "name", "value"), OUT_OF_RANGE)
def test_values_out_of_range(kind: type[torch.optim.Optimizer], name: str, value: Any) -> None:
    """Values that torch refuses in the constructor are also refused when they are set in a group later."""
    optimizer = kind(parameters())
    optimizer.param_groups[0][name] = value
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\({name}"):
        rule_for(optimizer)


def sgd(*, momentum: float, buffer: float, gradient: float = 1.0, nesterov: float = 0.0, **options: Any) -> Any:
    """Return a case of SGD whose scalars are these coefficients."""
    given = {"lr": 0.1, "weight_decay": 0.2, "momentum": momentum, **options}
    coefficients = {"buffer_coefficient": buffer, "gradient_coefficient": gradient, "nesterov_momentum": nesterov}
    scale = -0.5 if options.get("maximize") else 0.5
    return torch.optim.SGD, given, {"gradient_scale": scale, "weight_decay": 0.2, "lr": 0.1, **coefficients}


SCALARS = {
    "adamw": (
        3,
        torch.optim.AdamW,
        {"betas": (0.9, 0.99999), "weight_decay": 1e-5, "maximize": True},
        {
            "gradient_scale": -0.5,
            "one_minus_beta1": 1 - 0.9,
            "beta2": 0.99999,
            "one_minus_beta2": 1 - 0.99999,
            "decay": 1 - 1e-3 * 1e-5,
            "l2": 0.0,
            "step_size": 1e-3 / (1 - 0.9**3),
            "inverse_sqrt_bias_correction2": 1 / math.sqrt(1 - 0.99999**3),
            "eps": 1e-8,
        },
    ),
    **{
        f"adagrad, step {step}": (
            step,
            torch.optim.Adagrad,
            {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.2, "eps": 1e-9, "maximize": True},
            {"gradient_scale": -0.5, "weight_decay": 0.2, "step_size": 0.1 / (1 + (step - 1) * 0.3), "eps": 1e-9},
        )
        for step in (1, 7)
    },
    "rmsprop": (
        7,
        torch.optim.RMSprop,
        {"alpha": 0.99999, "centered": True, "maximize": True},
        {"gradient_scale": -0.5, "alpha": 0.99999, "one_minus_alpha": 1 - 0.99999, "centered": 1.0},
    ),
    # The first step with momentum takes the undamped gradient, and so does every step without momentum.
    "sgd, first step": (1, *sgd(momentum=0.9, dampening=0.3, buffer=0.0)),
    "sgd, second step": (2, *sgd(momentum=0.9, dampening=0.3, buffer=0.9, gradient=1 - 0.3)),
    "sgd without momentum": (2, *sgd(momentum=0.0, dampening=0.3, buffer=0.0)),
    "nesterov, first step": (1, *sgd(momentum=0.8, nesterov=0.8, buffer=0.0)),
    "nesterov, second step": (2, *sgd(momentum=0.8, nesterov=0.8, buffer=0.8, maximize=True)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(name: str) -> None:
    """Scalars are computed in double and rounded to fp32 once."""
    step, kind, options, expected = SCALARS[name]
    optimizer = kind(parameters(), **options, **({"nesterov": True} if "nesterov" in name else {}))
    rule = rule_for(optimizer)
    scalars = rule.scalars(rule.snapshot(optimizer.param_groups[0]), step=step, gradient_scale=0.5)
    rounded = {name: float(np.float32(value)) for name, value in expected.items()}
    assert {name: getattr(scalars, name) for name in expected} == rounded


# ---- every update rule through the handler: results like torch.optim's, and its state on storage
#
# ATen contracts multiplications and additions, and divides where the native core multiplies by an inverse, so results
# differ by a few units in the last place per step. After eight steps a relative 1e-6 and an absolute 1e-7 (of
# parameters of about 1) are allowed. It is 1e-6 absolute where a buffer of gradients is several times as large, and
# 1e-5 for RMSprop, whose buffer sums gradients divided by their root mean square; the first quotient is ten.


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


@pytest.mark.parametrize("name", CASES)
def test_follows_torch(tmp_path: Path, name: str) -> None:
    """Masters, arrays and step counts are torch's, wherever torch has them, and padding stays zero.

    This holds through groups, schedules, scaling and skipped parameters. As in torch, the first step with momentum
    starts the buffer with its undamped gradient.
    """
    with running(tmp_path, CASES[name]) as run:
        for number in range(NUM_STEPS):
            if "later" in name:
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
    state = kept(tmp_path, case)
    with pytest.raises(UnsupportedError, match=f"{case.rule.name}: it is for Adam or AdamW alone"):
        convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="int8")
    convert_store([tmp_path / "disk0"], [tmp_path / "new" / "disk0"], state_format="fp32", tasklet_bytes=100_000)
    with running(tmp_path / "new", case.but(tasklet_bytes=100_000), recover=True) as found:
        assert_equal({**found.state(), "partition": state["partition"]}, state)

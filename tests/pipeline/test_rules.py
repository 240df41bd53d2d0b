"""Update rules: the supported optimizers and the use of their hyperparameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.pipeline.rules import rule_for


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
    assert rule.name == kind.__name__
    assert rule.arrays == ARRAYS[kind]


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


ADAGRAD = {"lr": 0.1, "lr_decay": 0.3, "weight_decay": 0.2, "eps": 1e-9, "maximize": True}
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
            ADAGRAD,
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

"""The settings of the strategies for Trainer and Fabric are one object with one documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import (
    ConfigError,
    PlanConfig,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    SmartSSDConfig,
    TopK,
    TransferConfig,
)
from lightning_smartinfinity.integrations.lightning_options import checked_options
from lightning_smartinfinity.native.formats import STATE_FORMATS, optimizers_of
from lightning_smartinfinity.settings.strategy import StrategySettings

Strategy = type[SmartInfinityStrategy] | type[SmartInfinityFabricStrategy]
STRATEGIES: tuple[Strategy, ...] = (SmartInfinityStrategy, SmartInfinityFabricStrategy)
DEFAULTS: dict[str, Any] = {
    "storage": None,
    "update_device": "auto",
    "smartssd": None,
    "state_format": "fp32",
    "overlap": "auto",
    "compression": None,
    "activations": None,
    "transfer": None,
    "zero": None,
    "plan": None,
    "watchdog_timeout": 30.0,
    "collective_timeout": 1500.0,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_signature(strategy: Strategy) -> None:
    """The first argument may be given by position, the others by keyword only. All have these defaults."""
    parameters = list(inspect.signature(strategy).parameters.values())
    assert {one.name: one.default for one in parameters[:-1]} == DEFAULTS
    first, *others, options = (one.kind for one in parameters)
    assert first is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(others) == {inspect.Parameter.KEYWORD_ONLY}
    assert (parameters[-1].name, options) == ("options", inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_is_documented(strategy: Strategy) -> None:
    """Both classes document every argument, in the constructor's order and with the same text."""
    assert strategy.__doc__ is not None and StrategySettings.__doc__ is not None
    section = strategy.__doc__.split("Args:\n")[1].split("\n\n")[0]
    documented = re.findall(r"^ {8}(\*{0,2}\w+):", section, re.MULTILINE)
    assert documented == [*DEFAULTS, "**options"]
    shared = StrategySettings.__doc__.split("Args:\n")[1].split("\n\n")[0]
    assert section.startswith(shared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_argument_is_kept(strategy: Strategy, tmp_path: Path) -> None:
    """Each argument is kept under its name. Arguments that are left out have the defaults above."""
    given: dict[str, Any] = {
        "storage": [str(tmp_path / "a"), tmp_path / "b"],
        "update_device": "smartssd",
        "smartssd": SmartSSDConfig(xclbin="a"),
        "state_format": "fp32",
        "overlap": "forward",
        "compression": TopK(0.5),
        "transfer": TransferConfig(num_buffers=3, keep=True),
        "zero": {"reduce_bucket_size": 7},
        "plan": PlanConfig(batch=2),
        "watchdog_timeout": 90,
        "collective_timeout": 7200,
    }
    settings = strategy(**given)._settings
    kept = {**given, "storage": (tmp_path / "a", tmp_path / "b"), "activations": None}
    assert {name: getattr(settings, name) for name in DEFAULTS} == kept
    assert strategy(state_format="int8")._settings == StrategySettings(state_format="int8")
    defaults = {field.name: getattr(StrategySettings(), field.name) for field in dataclasses.fields(StrategySettings)}
    assert defaults == {**DEFAULTS, "transfer": TransferConfig()}


def test_documented_state_formats() -> None:
    """The documentation gives each format's bytes per parameter with Adam, and names the optimizers that have it."""
    text = " ".join((StrategySettings.__doc__ or "").split("state_format: ")[1].split("overlap: ")[0].split())
    documented = re.findall(r'``"(\w+)"`` \((\d+)', text)
    assert documented[:-1] == [(name, str(sum(form.item_bytes(3)))) for name, form in STATE_FORMATS.items()]
    everyones = [name for name, form in STATE_FORMATS.items() if form.step is None]
    assert documented[-1:] == [(name, str(sum(STATE_FORMATS[name].item_bytes(1)))) for name in everyones]
    others = {optimizers_of(form) for form in STATE_FORMATS.values() if form.step is not None}
    assert others == {"Adam or AdamW"} and "Optimizers other than Adam and AdamW have only" in text


@pytest.mark.parametrize("scale", [np.float32(512), np.int64(512), Fraction(512)])
def test_numbers_become_pythons(scale: Any) -> None:
    """Python's numbers replace those of other libraries, because DeepSpeed writes its settings as JSON."""
    kept = checked_options("SmartInfinityStrategy", {"loss_scale": scale, "min_loss_scale": scale})
    assert kept == {"loss_scale": 512, "min_loss_scale": 512}
    assert {type(value) for value in kept.values()} <= {int, float}


@pytest.mark.parametrize(("name", "most"), [("watchdog_timeout", 3600), ("collective_timeout", 604800)])
def test_seconds_of_the_watch(name: str, most: int) -> None:
    """Seconds below one would lose ranks of a busy machine, and none at all switch the watch off."""
    for seconds in (None, 0, 1, most):
        assert getattr(SmartInfinityStrategy(**{name: seconds})._settings, name) == seconds
    for wrong in (0.5, -1, most + 1, "30", True):
        with pytest.raises(ConfigError, match=rf"{name}=.* Pass a number from 1 to {most}, or 0, or None"):
            SmartInfinityStrategy(**{name: wrong})

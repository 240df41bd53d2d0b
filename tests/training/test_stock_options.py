"""Options of Lightning's DeepSpeedStrategy are answered with what does the same here, in one hop."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity import ConfigError, SmartInfinityFabricStrategy, SmartInfinityStrategy
from lightning_smartinfinity.integrations.fabric.strategy import FabricOptions
from lightning_smartinfinity.integrations.trainer.strategy import LightningOptions

DEFAULTS = {
    name: parameter.default
    for stock in (FabricDeepSpeedStrategy, DeepSpeedStrategy)
    for name, parameter in inspect.signature(stock).parameters.items()
}
REFUSED = sorted(DEFAULTS.keys() - (LightningOptions.__annotations__.keys() & FabricOptions.__annotations__.keys()))
OURS = ((SmartInfinityStrategy, LightningOptions), (SmartInfinityFabricStrategy, FabricOptions))
# What only users of the other class can write.
FOREIGN = {
    SmartInfinityStrategy: ("Fabric", "fabric", "TrainingArguments"),
    SmartInfinityFabricStrategy: ("Trainer", "configure_model", "TrainingArguments"),
}
# Values that people give, where the default is None or switches nothing on.
VALUES: dict[str, Any] = {
    "config": "ds_config.json",
    "cpu_checkpointing": True,
    "offload_optimizer": True,
    "offload_parameters": True,
    "offload_params_device": "nvme",
    "remote_device": "nvme",
}


def value_of(name: str) -> Any:
    return VALUES.get(name, DEFAULTS[name])


@pytest.mark.parametrize("name", DEFAULTS)
def test_an_option_of_stock_deepspeed(name: str) -> None:
    """Each option of the installed class is taken as it is, or answered with what to write instead."""
    for strategy, known in OURS:
        if name in known.__annotations__:
            strategy(**{name: value_of(name)})
            continue
        with pytest.raises(ConfigError) as caught:
            strategy(**{name: value_of(name)})
        assert caught.value.problem == f"{strategy.__name__} has no setting {name!r}."
        assert re.match("Leave it out|Pass|Call", caught.value.remedy), "the option has no answer of its own"
        assert not [word for word in FOREIGN[strategy] if word in caught.value.remedy]

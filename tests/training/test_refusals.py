"""Unsupported features of DeepSpeed and torch are refused with a remedy, before or during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy, UnsupportedError
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import assert_helpful, fit


@pytest.mark.parametrize(
    ("zero", "error", "named"),
    [
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, ConfigError, "offload_optimizer"),
        ({"super_offload": True}, UnsupportedError, "SuperOffload"),
        ({"zero_quantized_gradients": True}, UnsupportedError, "quantized gradients"),
        ({"zero_quantized_nontrainable_weights": True}, UnsupportedError, "quantized weights"),
        ({"elastic_checkpoint": True}, UnsupportedError, "elastic"),
        ({"load_from_fp32_weights": False}, UnsupportedError, "load_from_fp32_weights"),
        ({"cpu_offload": True}, ConfigError, "storage"),
        ({"cpu_offload_param": True}, ConfigError, "offload_param"),
        ({"cpu_offload_use_pin_memory": True}, ConfigError, "pin_memory"),
    ],
)
def test_refused_zero_settings_raise_in_the_constructor(
    zero: dict[str, Any], error: type[ConfigError | UnsupportedError], named: str
) -> None:
    """The error names the key, whether the feature is refused, the strategy owns it, or the name is old."""
    with pytest.raises(error) as caught:
        SmartInfinityStrategy(zero=zero)
    assert_helpful(caught.value, next(iter(zero)), named)


@pytest.mark.parametrize(
    "zero", [{"zero_quantized_gradients": False}, {"elastic_checkpoint": False}, {"load_from_fp32_weights": True}]
)
def test_refused_features_may_be_switched_off_explicitly(zero: dict[str, Any]) -> None:
    """A configuration that sets a refused feature to its harmless value is accepted."""
    SmartInfinityStrategy(zero=zero)


def test_no_buffers_for_parameters_on_storage(tmp_path: Path) -> None:
    """buffer_count=0 is refused, since reading a parameter needs a buffer. Nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "s", zero={"offload_param": {"device": "nvme", "buffer_count": 0}})
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(Recipe()), strategy, tmp_path)
    assert_helpful(caught.value, "buffer_count", "at least 1")
    assert not list(tmp_path.iterdir())


def _expert_parameter(module: LitTiny) -> None:
    module.model.side.weight.allreduce = False  # type: ignore[assignment]


def _moe_layer(module: LitTiny) -> None:
    from deepspeed.moe.experts import Experts

    module.model.side = Experts(torch.nn.Linear(32, 32))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(_expert_parameter, "model.side.weight"), (_moe_layer, "deepspeed.moe")],
    ids=["expert's parameter", "expert layer"],
)
def test_models_that_cannot_be_partitioned_are_refused(
    spoil: Callable[[LitTiny], None], named: str, tmp_path: Path
) -> None:
    """The error names MoE layers and expert parameters. Nothing is written."""
    strategy = SmartInfinityStrategy(tmp_path / "s")
    module = LitTiny(Recipe())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    spoil(module)
    with pytest.raises(UnsupportedError) as caught:
        fit(module, strategy, tmp_path)
    assert_helpful(caught.value, named, "model.side")
    assert not (tmp_path / "s").exists()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_given_twice_is_refused(tmp_path: Path) -> None:
    """Torch only warns of a duplicate in one group. Our error names the parameter, and nothing is written."""
    module = LitTiny(Recipe())
    params = [*module.parameters(), module.model.side.weight]
    module.configure_optimizers = lambda: torch.optim.AdamW(params)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError) as caught:
        fit(module, SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, "'model.side.weight'", "2 times")
    assert not (tmp_path / "s").exists()


class SparseAtRunTime(LitTiny):
    """A module whose forward, not its layers, asks for sparse gradients."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return functional.embedding(batch, self.model.tokens.weight, sparse=True).square().mean()


def test_sparse_gradients_at_run_time_are_refused(tmp_path: Path) -> None:
    """The first sparse gradient raises in backward and names its parameter. close() removes the state."""
    strategy = SmartInfinityStrategy(tmp_path / "s")
    with pytest.raises(UnsupportedError) as caught:
        fit(SparseAtRunTime(Recipe(tied=False)), strategy, tmp_path)
    assert_helpful(caught.value, "tokens.weight", "sparse=False")
    strategy.close()
    assert not list((tmp_path / "s").rglob("*.bin"))


class TwoByHand(LitTiny):
    """A module with two optimizers and manual optimization, which Lightning itself allows."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return [torch.optim.AdamW(params[:3]), torch.optim.AdamW(params[3:])]


@pytest.mark.seam("refusing several optimizers", "lightning.pytorch.core.optimizer._init_optimizers_and_lr_schedulers.")
def test_several_optimizers_by_hand_are_refused(tmp_path: Path) -> None:
    """The limit of one optimizer also holds for manual optimization."""
    with pytest.raises(UnsupportedError) as caught:
        fit(TwoByHand(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, "2 optimizers", "parameter groups")
    assert not (tmp_path / "s").exists()


class CallRefused(pl.Callback):
    """A callback that makes every call on engine and optimizer that is refused during training."""

    def __init__(self) -> None:
        self.refused: dict[str, UnsupportedError] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        engine: Any = trainer.strategy.model
        optimizer = engine.optimizer
        calls: dict[str, Callable[[], Any]] = {
            "engine.offload_states": engine.offload_states,
            "engine.reload_states": engine.reload_states,
            "optimizer.offload_states": optimizer.offload_states,
            "optimizer.reload_states": lambda: optimizer.reload_states(non_blocking=True),
            "optimizer.add_param_group": lambda: trainer.optimizers[0].add_param_group({"params": []}),
        }
        for name, call in calls.items():
            with pytest.raises(UnsupportedError) as caught:
                call()
            self.refused[name] = caught.value


def test_calls_that_would_move_or_extend_the_state_are_refused(tmp_path: Path) -> None:
    """offload_states, reload_states and add_param_group raise, and training continues unchanged."""
    callback, recipe = CallRefused(), Recipe(max_steps=2)
    module, undisturbed = LitTiny(recipe), LitTiny(recipe)
    for trained, callbacks in ((module, [callback]), (undisturbed, [])):
        strategy = SmartInfinityStrategy(tmp_path / "s")
        fit(trained, strategy, tmp_path, max_steps=2, callbacks=callbacks)
        strategy.close()
    assert len(callback.refused) == 5
    for name, error in callback.refused.items():
        assert_helpful(error, name.split(".")[1])
    assert module.losses == undisturbed.losses

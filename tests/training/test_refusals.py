"""Unsupported features of DeepSpeed and torch are refused with a remedy, before or during training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.experts import Experts
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
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


def optimized(module: LitTiny, *more: nn.Parameter) -> None:
    """Let an optimizer train the module's parameters and more."""
    params = [*module.parameters(), *more]
    module.configure_optimizers = lambda: torch.optim.AdamW(params)  # type: ignore[method-assign]


def computing(module: LitTiny, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let each step return something else than its loss."""
    step = module.training_step
    module.training_step = lambda *batch: change(step(*batch))  # type: ignore[method-assign]


def embedding_sparsely(module: LitTiny) -> None:
    ones, table = torch.ones(2, dtype=torch.long), module.model.tokens.weight
    computing(module, lambda _: functional.embedding(ones, table, sparse=True).sum())


BEFORE_TRAINING: dict[str, tuple[Callable[[LitTiny], object], tuple[str, ...]]] = {
    "expert's parameter": (lambda m: setattr(m.model.side.weight, "allreduce", False), ("model.side.weight",)),
    "expert layer": (lambda m: setattr(m.model, "side", Experts(nn.Linear(32, 32))), ("model.side", "deepspeed.moe")),
    "a parameter given twice": (lambda m: optimized(m, m.model.side.weight), ("'model.side.weight'", "2 times")),
    "another's parameter": (
        lambda m: optimized(m, nn.Parameter(torch.ones(3, 5))),
        ("group 0", "(3, 5)", "LitTiny"),
    ),
}
IN_TRAINING: dict[str, tuple[Callable[[LitTiny], object], tuple[str, ...]]] = {
    "a loss without a graph": (lambda m: computing(m, torch.Tensor.detach), ("has no graph", "no_grad", "outputs")),
    "another loss": (lambda m: computing(m, lambda _: torch.tensor(1.0)), ("has no graph", "no_grad", "outputs")),
    "sparse gradients at run time": (embedding_sparsely, ("tokens.weight", "sparse=False")),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", [*BEFORE_TRAINING, *IN_TRAINING])
def test_models_that_cannot_be_trained_are_refused(name: str, tmp_path: Path) -> None:
    """The error names what is wrong. Nothing is written before training, and close() removes what was."""
    spoil, named = {**BEFORE_TRAINING, **IN_TRAINING}[name]
    strategy, module = SmartInfinityStrategy(tmp_path / "s"), LitTiny(Recipe(tied=False))
    if name.startswith("expert"):
        optimized(module)
    spoil(module)
    with pytest.raises(UnsupportedError) as caught:
        fit(module, strategy, tmp_path)
    assert_helpful(caught.value, *named)
    assert (tmp_path / "s").exists() == (name in IN_TRAINING)
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


def test_calls_that_would_move_or_extend_the_state_are_refused(tmp_path: Path) -> None:
    """offload_states, reload_states and add_param_group raise, and training continues unchanged."""

    def call(trainer: Any, *_: Any) -> None:
        engine = trainer.strategy.model
        calls: dict[str, Callable[[], Any]] = {
            "offload_states": engine.offload_states,
            "reload_states": engine.reload_states,
            "optimizer.offload_states": engine.optimizer.offload_states,
            "optimizer.reload_states": lambda: engine.optimizer.reload_states(non_blocking=True),
            "add_param_group": lambda: trainer.optimizers[0].add_param_group({"params": []}),
        }
        for name, refused in calls.items():
            with pytest.raises(UnsupportedError) as caught:
                refused()
            assert_helpful(caught.value, name.split(".")[-1])
        called.append(trainer.global_step)

    called: list[int] = []
    module, undisturbed = LitTiny(Recipe(max_steps=2)), LitTiny(Recipe(max_steps=2))
    for trained, callbacks in ((module, [LambdaCallback(on_train_batch_end=call)]), (undisturbed, [])):
        strategy = SmartInfinityStrategy(tmp_path / "s")
        fit(trained, strategy, tmp_path, max_steps=2, callbacks=callbacks)
        strategy.close()
    assert called == [1, 2] and module.losses == undisturbed.losses

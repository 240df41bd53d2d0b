"""Methods of Lightning and torch that a module overrides run as in memory, and may return anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_smartinfinity import UnsupportedError
from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.small import Small, assert_as_in_memory, changed


class InTwoParts(Small):
    """Runs backward twice, once with a graph that it keeps."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.25).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        self.seen.append(float(self.net[0].weight.grad.norm()))  # type: ignore[operator, union-attr]
        super().backward(loss * 2, torch.tensor(0.5), **kwargs)


class Clipped(Small):
    """Looks at what it has clipped."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.seen.append(float(torch.stack([param.grad.norm() for param in self.parameters()]).norm()))  # type: ignore[union-attr]


class Looking(Small):
    """Looks at gradients, from which a penalty on the input's gradient is made, in validation."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        with torch.enable_grad():
            batch = batch.clone().requires_grad_()
            loss = self.net(batch).square().mean()
            found = torch.autograd.grad(loss, [batch, self.net[4].weight])  # type: ignore[list-item]
        self.seen.extend(float(gradient.norm()) for gradient in found)

    def on_validation_epoch_end(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.seen.extend(float(param.norm()) for param in self.parameters())


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (InTwoParts, {}),
        (InTwoParts, {"accumulate_grad_batches": 2}),
        (Clipped, {"gradient_clip_val": 0.05}),
        (Looking, {"inference_mode": False}),
    ],
)
def test_an_overridden_method_does_what_it_does_in_memory(
    make: Callable[[], Small], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, what the method sees and the weights at the end are equal."""
    assert_as_in_memory(tmp_path, make, max_epochs=2, **settings)


class Passing(nn.Linear):
    """Passes on what it is asked to save and to load."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class Saved(Small):
    """Overrides everything by which weights come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Passing(8, 32)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        self.seen.append(checkpoint["state_dict"]["net.0.weight"].clone())


def test_a_module_with_its_own_state_dict_is_saved_and_resumed(tmp_path: Path) -> None:
    """A checkpoint of the first epoch brings back the weights that it had."""
    trained, resumed = Saved(), Saved()
    fit(trained, tmp_path, precision="32-true").save_checkpoint(tmp_path / "one.ckpt")
    again = quiet_trainer(tmp_path, precision="32-true", max_steps=4)
    again.fit(resumed, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert torch.equal(resumed.seen[0], trained.net[0].weight.detach().clone())  # type: ignore[operator, union-attr]
    assert len(resumed.seen) == 2


def test_a_checkpoint_with_storage_options_is_refused(tmp_path: Path) -> None:
    """Lightning would raise a TypeError of its own, in the midst of saving."""
    trainer = fit(Small(), tmp_path, max_steps=1)
    with pytest.raises(UnsupportedError, match=r"storage_options=\{'key': 1\}"):
        trainer.save_checkpoint(tmp_path / "one.ckpt", storage_options={"key": 1})


def of_data(**settings: Any) -> Any:
    torch.manual_seed(5)
    return DataLoader(torch.randn(20, 8), batch_size=4, **settings)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": of_data,
    "shuffled": lambda: of_data(shuffle=True),
    "weighted": lambda: of_data(sampler=WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 12)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_sees_the_batches_of_its_loader(kind: str, tmp_path: Path) -> None:
    """Lightning would put a sampler for several processes into it, which shuffles."""
    make = changed(lambda module: setattr(module, "train_dataloader", LOADERS[kind]))
    assert_as_in_memory(tmp_path, make, max_epochs=2, use_distributed_sampler=True)


@dataclass(slots=True)
class Slotted:
    """An object without a dictionary of attributes."""

    value: float


OUTPUTS: dict[str, Any] = {
    "a float": 0.5,
    "an int": 3,
    "text": "text",
    "a bool": True,
    "bytes": b"bytes",
    "a set": {1, 2},
    "an array": np.arange(3.0),
    "a scalar of numpy": np.float32(0.5),
    "an object with slots": Slotted(0.5),
    "a class": Slotted,
    "a dictionary with other keys than text": {0: "zero", (1, 2): 0.5, None: [1]},
    "a list": [1, "text", None],
    "nothing": None,
}


class Returning(Everything):
    """A module whose evaluation returns each of these outputs in turn, also through a submodule."""

    def __init__(self) -> None:
        super().__init__(RECIPE)
        self.seen: list[Any] = []
        self.passing = nn.Identity()
        self.passing.weight = nn.Parameter(torch.ones(1))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.model(batch)
        return self.passing(list(OUTPUTS.values())[batch_idx])

    test_step = predict_step = validation_step

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(len(OUTPUTS), 16, dtype=torch.long), batch_size=1)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


def test_evaluation_steps_and_submodules_return_anything(tmp_path: Path) -> None:
    """Lightning's loops and callbacks see the very outputs, before a fit, within it and after it."""

    def scenario(make: Any, root: Path) -> Any:
        module = Returning()
        trainer = make(max_steps=1, num_sanity_val_steps=0, val_check_interval=1, limit_train_batches=1)
        trainer.validate(module, verbose=False)
        trainer.fit(module)
        trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        assert len(module.seen) == 3 * len(OUTPUTS)
        return [[repr(output) for output in outputs] for outputs in (module.seen, predicted)]

    seen, predicted = assert_like_plain_lightning(scenario, tmp_path)
    assert seen == [repr(output) for output in OUTPUTS.values()] * 3
    assert predicted == [repr(output) for output in OUTPUTS.values()]


def test_a_training_step_that_returns_a_float(tmp_path: Path) -> None:
    """Lightning's own error says what to return, as with other strategies."""
    module = Everything()
    module.training_step = lambda batch, batch_idx: 0.5  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match="must return a Tensor"):
        fit(module, tmp_path)

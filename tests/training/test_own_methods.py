"""Methods of Lightning and torch that a module overrides run as in memory: backward, clipping, state dicts, loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_smartinfinity import UnsupportedError
from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small, assert_as_in_memory, changed


class Halved(Small):
    """Scales the loss in its own backward."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.5, *args, **kwargs)


class InTwoParts(Small):
    """Runs backward twice, once with a graph that it keeps."""

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.25).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        self.seen.append(float(self.net[0].weight.grad.norm()))  # type: ignore[operator, union-attr]
        (loss * 2).backward(torch.tensor(0.5))  # type: ignore[no-untyped-call]


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
        (Halved, {}),
        (Halved, {"accumulate_grad_batches": 2}),
        (InTwoParts, {}),
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
    """Overrides everything by which weights come and go, and counts the weights of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Passing(8, 32)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        shapes = {name: value.shape for name, value in checkpoint["state_dict"].items()}
        assert shapes == {name: value.shape for name, value in self.state_dict().items()}
        self.seen.append(float(checkpoint["state_dict"]["net.0.weight"].norm()))


def test_a_module_with_its_own_state_dict_is_saved_and_resumed(tmp_path: Path) -> None:
    """A checkpoint of the first epoch brings back the weights that it had."""
    trained = Saved()
    trainer = quiet_trainer(tmp_path, precision="32-true", max_epochs=1)
    trainer.fit(trained)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = Saved()
    again = quiet_trainer(tmp_path, precision="32-true", max_epochs=2)
    again.fit(resumed, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    norm = float(trained.net[0].weight.norm())  # type: ignore[operator, arg-type]
    assert resumed.seen[0] == pytest.approx(norm)
    assert len(resumed.seen) == 1 + len(trained.seen)


def test_a_checkpoint_with_storage_options_is_refused(tmp_path: Path) -> None:
    """Lightning would raise a TypeError of its own, in the midst of saving."""
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(Small())
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

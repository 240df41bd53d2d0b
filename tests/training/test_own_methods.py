"""Methods of Lightning and torch that a module overrides run as in memory: backward, clipping, state dicts, loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_smartinfinity import UnsupportedError
from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small


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
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.seen.extend(float(param.norm()) for param in self.parameters())


def results(tmp_path: Path, make: Callable[[], Small], **settings: Any) -> list[list[Any]]:
    """Return what modules have seen that were fitted in memory and here."""
    seen = []
    for strategy in ("auto", None):
        module = make()
        trainer = quiet_trainer(
            tmp_path / str(strategy), strategy, **{"precision": "32-true", "max_epochs": 2, **settings}
        )
        trainer.fit(module)
        seen.append([*module.seen, *(float(param.detach().norm()) for param in module.parameters())])
    return seen


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Halved, {}),
        (Halved, {"accumulate_grad_batches": 2}),
        (InTwoParts, {}),
        (Clipped, {"gradient_clip_val": 0.05}),
        (Looking, {"inference_mode": False, "num_sanity_val_steps": 0}),
    ],
)
def test_an_overridden_method_does_what_it_does_in_memory(
    make: Callable[[], Small], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, what the method sees and the weights at the end are equal."""
    in_memory, here = results(tmp_path, make, **settings)
    assert here == pytest.approx(in_memory, rel=1e-5)


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


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(torch.arange(40.0).view(20, 2), batch_size=4),  # type: ignore[arg-type]
    "shuffled": lambda: DataLoader(torch.arange(40.0).view(20, 2), batch_size=4, shuffle=True),  # type: ignore[arg-type]
    "weighted": lambda: DataLoader(
        torch.arange(40.0).view(20, 2),  # type: ignore[arg-type]
        batch_size=4,
        sampler=WeightedRandomSampler([1.0] * 10 + [3.0] * 10, 12),
    ),
}


class Batches(pl.LightningModule):
    """Notes the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.batches.append(batch.tolist())
        return self.layer(batch).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_sees_the_batches_of_its_loader(kind: str, tmp_path: Path) -> None:
    """Lightning would put a sampler for several processes into it, which shuffles."""
    batches = []
    for strategy in ("auto", None):
        module, loader = Batches(), LOADERS[kind]()
        trainer = quiet_trainer(tmp_path / str(strategy), strategy, precision="32-true", max_epochs=2)
        torch.manual_seed(5)
        trainer.fit(module, loader)
        batches.append(module.batches)
    assert batches[0] == batches[1]

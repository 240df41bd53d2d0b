"""An interrupted fit resumes from storage with the batches and random numbers of one that never stopped."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from tests.helpers.trainers import quiet_trainer
from tests.training.loaders import Noisy, Plain, SizedStream, Stream, generator

NUM_EPOCHS = 3


class Broken(Exception):
    """An exception in the user's code."""


class Module(pl.LightningModule):
    """Writes down what each batch holds and what is drawn beside it, and raises before a step."""

    def __init__(self, make: Callable[[], Any], *, breaks_at: int | None = None) -> None:
        super().__init__()
        self.make, self.breaks_at = make, breaks_at
        self.net = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return DataLoader(Plain(), 4)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == self.breaks_at:
            raise Broken

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        told = [None if part is None else part.flatten().tolist() for part in parts]
        self.seen.append((self.trainer.global_step, self.current_epoch, batch_idx, told, float(torch.rand(()))))
        loss: torch.Tensor = self.net(parts[0] if parts[0] is not None else parts[1]).pow(2).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        drawn = float(torch.rand(()))
        if not self.trainer.sanity_checking:
            self.seen.append(("validation", drawn))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Numbered:
    """A loader of the user's with a state of its own."""

    num_yielded = num_loaded = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.num_loaded = self.num_loaded, 0
        for number in range(begin, 6):
            self.num_yielded = number + 1
            yield torch.tensor([[float(number)]])

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_loaded = state["num_yielded"]


class Counting(Stream):
    """A stream that draws no random numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in range(11))


def combined(mode: str, first: Any = Noisy, *, own: bool = False) -> Callable[[], Any]:
    """Return what makes two loaders, each with a generator of its own or both with torch's."""

    def make() -> Any:
        a, b = (generator(seed) if own else None for seed in (5, 6))
        shuffle = {} if issubclass(first, Stream) else {"shuffle": True}
        loaders = {
            "a": DataLoader(first(), 2, generator=a, **shuffle),
            "b": DataLoader(Noisy(), 4, generator=b, shuffle=True),
        }
        return CombinedLoader(loaders, mode)  # type: ignore[arg-type]

    return make


def shuffled(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(), 3, shuffle=True, **options)


EVERY = {"reload_dataloaders_every_n_epochs": 1}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "stream": (lambda: DataLoader(Stream(), 2), {}),
    "sized stream": (lambda: DataLoader(SizedStream(), 2), {}),
    "stream, generator": (lambda: DataLoader(Stream(), 2, generator=generator()), {}),
    "stream, worker": (lambda: DataLoader(Stream(), 3, num_workers=1), {}),
    "stream, worker that stays": (lambda: DataLoader(Counting(), 3, num_workers=1, persistent_workers=True), {}),
    "stream, validation": (lambda: DataLoader(Stream(), 2), {"val_check_interval": 2, "limit_val_batches": 1}),
    "stream, accumulation": (lambda: DataLoader(Stream(), 2), {"accumulate_grad_batches": 2}),
    "stream, limit": (lambda: DataLoader(Stream(), 2), {"limit_train_batches": 3}),
    "stream, steps": (lambda: DataLoader(Stream(), 2), {"max_steps": 14, "max_epochs": -1}),
    "stream, loaded again": (lambda: DataLoader(Stream(), 3), EVERY),
    "stream, own state": (Numbered, {}),
    "two, cycle": (combined("max_size_cycle"), {}),
    "two, cycle, accumulation": (combined("max_size_cycle"), {"accumulate_grad_batches": 3}),
    "two, longest": (combined("max_size"), {}),
    "two, shortest": (combined("min_size"), {}),
    "two, cycle, stream": (combined("max_size_cycle", Stream), {}),
    "two, longest, stream": (combined("max_size", Stream), {}),
    "two, cycle, generator": (combined("max_size_cycle", own=True), {}),
    "loaded again": (shuffled(), EVERY),
    "loaded again, limit": (shuffled(), {**EVERY, "limit_train_batches": 2}),
    "every second epoch": (shuffled(), {"reload_dataloaders_every_n_epochs": 2}),
    "workers": (lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=1), {}),
}
SHORT = {
    "stream": [3],
    "stream, own state": [6],
    "two, cycle, stream": [4],
    "loaded again": [1],
    "workers": [2],
}
"""Cases that always run, each with the steps before which it is interrupted."""


def fit(module: Module, root: Path, *, seed: int, settings: dict[str, Any], resume: str | None = None) -> int:
    """Fit with a seed and storage in a folder; return the number of steps."""
    pl.seed_everything(seed)
    # An error before the first step would leave nothing, unlike a kill.
    strategy = SmartInfinityStrategy(root / "state", overlap="none", transfer={"keep": True})
    trainer = quiet_trainer(
        root, strategy, **{"max_epochs": NUM_EPOCHS, "limit_val_batches": 0, "precision": "32-true", **settings}
    )
    with pytest.raises(Broken) if module.breaks_at is not None else nullcontext():
        trainer.fit(module, ckpt_path=resume)
    strategy.close()
    return trainer.global_step


def check(name: str, root: Path, breaks: list[int] | None) -> None:
    make, settings = CASES[name]
    whole = Module(make)
    num_steps = fit(whole, root / "whole", seed=1, settings=settings)
    for step in range(num_steps) if breaks is None else breaks:
        begun, resumed = Module(make, breaks_at=step), Module(make)
        fit(begun, root / str(step), seed=1, settings=settings)
        fit(resumed, root / str(step), seed=9, settings=settings, resume="storage")
        # Micro-batches of a step that was not taken are repeated.
        kept = [one for one in begun.seen if one[0] == "validation" or one[0] < step]
        assert [*kept, *resumed.seen] == whole.seen, f"interrupted before step {step}"


@pytest.mark.seam(
    "loaders of every kind go on from storage",
    "_FitLoop.setup_data calls _load_combined_loader_states and then creates the iterators; "
    "_last_train_dl_reload_epoch; _TrainingEpochLoop._on_before_fetch is called before each batch; "
    "_PrefetchDataFetcher.batches, which ``next`` does not fill while it is empty; "
    "CombinedLoader._iterator._consumed; PL_GLOBAL_SEED is the seed of the samplers that Lightning makes.",
)
@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        *itertools.starmap(pytest.param, SHORT.items()),
        *(pytest.param(name, None, marks=pytest.mark.long, id=f"{name}, every step") for name in CASES),
    ],
)
def test_every_loader_goes_on(name: str, breaks: list[int] | None, tmp_path: Path) -> None:
    """Whatever feeds a fit, and wherever in an epoch it stops, a process with another seed goes on with its batches."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check(name, tmp_path, breaks)
    warned = any("not exactly" in str(warning.message) for warning in told)
    assert warned == (name in ("workers", "stream, worker that stays"))


class Untold:
    """Batches without a state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([[float(number)]]) for number in range(4))


def test_what_is_not_exact_is_told(tmp_path: Path) -> None:
    """A warning names what a resume cannot repeat. Workers have it in ``test_every_loader_goes_on``."""
    fit(Module(Untold, breaks_at=2), tmp_path, seed=1, settings={})
    told = "not exactly the one that was interrupted: a loader without state_dict and load_state_dict begins the epoch"
    with pytest.warns(UserWarning, match=told):
        fit(Module(Untold), tmp_path, seed=1, settings={"max_epochs": 1}, resume="storage")

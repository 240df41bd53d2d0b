"""A fit resumes, from storage or a checkpoint, with the batches and random numbers of one that never stopped."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.integrations.trainer import fit_record
from lightning_smartinfinity.integrations.trainer.fit_record import TrainerFitRecord
from tests.helpers.long_cases import long_but
from tests.helpers.random_fit import StatefulLoader
from tests.helpers.trainers import quiet_trainer
from tests.training.test_loader_position import Noisy, Plain, SizedStream, Stream, generator
from tests.training.test_loop_exceptions import Broken

Point = tuple[str, int]
"""A hook, and the number of its calls."""


class Module(pl.LightningModule):
    """Writes down what each batch holds, what is drawn beside it and the loss, raises before a step, and saves.

    Attributes:
        seen: What was written down.
        saved: For each checkpoint, how much had been written down before the batch that was not finished.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        breaks_at: int | None = None,
        folder: Path | None = None,
        points: Collection[Point] | None = None,
        counts_steps: bool = False,
    ) -> None:
        super().__init__()
        self.make, self.breaks_at, self.counts_steps = make, breaks_at, counts_steps
        self.folder, self.points = folder, points
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.saved: dict[Point, int] = {}
        self.calls: Counter[str] = Counter()

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return DataLoader(Plain(), 4)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == self.breaks_at:
            raise Broken
        self.save("batch start")

    def on_train_start(self) -> None:
        torch.rand(2)
        self.save("start")

    def on_train_epoch_start(self) -> None:
        self.save("epoch start")  # a fit that resumes here calls this hook again
        torch.rand(3)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.save("step", unfinished=1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.save("batch end")

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.save("validation end")

    def on_train_epoch_end(self) -> None:
        self.save("epoch end")

    def save(self, hook: str, *, unfinished: int = 0) -> None:
        self.calls[hook] += 1
        point = hook, self.calls[hook]
        if self.folder is not None and (self.points is None or point in self.points):
            self.saved[point] = len(self.seen) - unfinished
            self.trainer.save_checkpoint(self.folder / "-".join(map(str, point)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        told = [None if part is None else part.flatten().tolist() for part in parts]
        values = parts[0] if parts[0] is not None else parts[1]
        loss: torch.Tensor = self.net(values.reshape(-1, 1)).pow(2).mean()
        drawn = float(torch.rand(())), float(loss.detach())
        self.seen.append((self.trainer.global_step, self.current_epoch, batch_idx, told, drawn))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        drawn = float(torch.rand(()))
        if not self.trainer.sanity_checking:
            self.seen.append(("validation", drawn))

    def configure_optimizers(self) -> Any:
        assert not self.counts_steps or self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class Counting(Stream):
    """A stream that draws no random numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index)]) for index in range(11))


def combined(mode: str, first: Any = Noisy, *, own: bool = False, shared: bool = False) -> Callable[[], Any]:
    """Return what makes two loaders, each with a generator of its own, both with one, or both with torch's."""

    def make() -> Any:
        a, b = (generator(seed) if own else None for seed in (5, 6))
        if shared:
            a = b = generator()
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
    "own state": (StatefulLoader, {}),
    "two, cycle": (combined("max_size_cycle"), {}),
    "two, cycle, accumulation": (combined("max_size_cycle"), {"accumulate_grad_batches": 3}),
    "two, longest": (combined("max_size"), {}),
    "two, shortest": (combined("min_size"), {}),
    "two, cycle, stream": (combined("max_size_cycle", Stream), {}),
    "two, longest, stream": (combined("max_size", Stream), {}),
    "two, cycle, generator": (combined("max_size_cycle", own=True), {}),
    "two, cycle, shared generator": (combined("max_size_cycle", shared=True), {}),
    "two, longest, shared generator": (combined("max_size", shared=True), {}),
    "plain": (lambda: DataLoader(Noisy(), 3), {}),
    "generator": (lambda: DataLoader(Noisy(), 3, shuffle=True, generator=generator()), {}),
    "validation": (shuffled(), {"val_check_interval": 2, "limit_val_batches": 1}),
    "steps": (shuffled(), {"max_steps": 10, "max_epochs": -1}),
    "steps, validation": (shuffled(), {"max_steps": 10, "max_epochs": -1, "limit_val_batches": 1}),
    "loaded again": (shuffled(), EVERY),
    "loaded again, limit": (shuffled(), {**EVERY, "limit_train_batches": 2}),
    "every second epoch": (shuffled(), {"reload_dataloaders_every_n_epochs": 2}),
    "workers": (lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=1), {}),
}
for name in ("own state", "plain", "steps, validation"):
    CASES[f"{name}, loaders set up early"] = CASES[name]
SHORT: dict[str, tuple[list[int], list[Point]]] = {
    "stream": ([3], [("step", 3), ("batch end", 8)]),
    "own state, loaders set up early": ([6], [("batch end", 2), ("batch end", 4)]),
    "two, cycle, stream": ([4], []),
    "two, cycle, shared generator": ([5], [("batch end", 4), ("epoch end", 1), ("step", 1)]),
    "validation": ([], [("batch end", 2), ("batch end", 4), ("validation end", 3), ("epoch start", 2)]),
    "steps, validation, loaders set up early": ([], [("batch end", 2), ("validation end", 1), ("epoch end", 1)]),
    "loaded again, limit": ([1], [("batch end", 1), ("epoch end", 2)]),
    "workers": ([2], [("batch end", 1)]),
}
"""Cases that always run, each with the steps before which it is interrupted, and the points at which it is saved."""


def fit(module: Module, root: Path, *, seed: int, settings: dict[str, Any], resume: str | None = None) -> int:
    """Fit with a seed and storage in a folder; return the number of steps."""
    pl.seed_everything(seed)
    # An error before the first step would leave nothing, unlike a kill.
    strategy = SmartInfinityStrategy(root / "state", overlap="none", transfer={"keep": True})
    trainer = quiet_trainer(
        root, strategy, **{"max_epochs": 3, "limit_val_batches": 0, "precision": "32-true", **settings}
    )
    with pytest.raises(Broken) if module.breaks_at is not None else nullcontext():
        trainer.fit(module, ckpt_path=resume)
    strategy.close()
    return trainer.global_step


def check(name: str, root: Path, breaks: list[int] | None, points: list[Point] | None) -> None:
    """Assert that a fit goes on from storage after each interruption, and from its checkpoints; None: of all points."""
    make, settings = CASES[name]
    made = partial(Module, make, counts_steps="early" in name)
    whole = made(folder=root, points=points)
    num_steps = fit(whole, root / "whole", seed=1, settings=settings)
    for step in range(num_steps) if breaks is None else breaks:
        begun, resumed = made(breaks_at=step), made()
        fit(begun, root / str(step), seed=1, settings=settings)
        fit(resumed, root / str(step), seed=9, settings=settings, resume="storage")
        # Micro-batches of a step that was not taken are repeated.
        kept = [one for one in begun.seen if one[0] == "validation" or one[0] < step]
        assert [*kept, *resumed.seen] == whole.seen, f"interrupted before step {step}"
    for point in whole.saved if points is None else points:
        resumed, saved = made(), "-".join(map(str, point))
        fit(resumed, root / f"from {saved}", seed=9, settings=settings, resume=str(root / saved))
        assert resumed.seen == whole.seen[whole.saved[point] :], f"saved at {point}"


@pytest.mark.seam(
    "loaders of every kind go on from storage",
    "_FitLoop.setup_data calls _load_combined_loader_states and then creates the iterators; "
    "_last_train_dl_reload_epoch; _TrainingEpochLoop._on_before_fetch is called before each batch; "
    "_PrefetchDataFetcher.batches, which ``next`` does not fill while it is empty; "
    "CombinedLoader._iterator._consumed; PL_GLOBAL_SEED is the seed of the samplers that Lightning makes.",
)
@pytest.mark.parametrize(
    ("name", "breaks", "points"),
    [
        *((name, *short) for name, short in SHORT.items()),
        *(pytest.param(name, None, None, marks=pytest.mark.long, id=f"{name}, every step and point") for name in CASES),
    ],
)
def test_every_loader_goes_on(name: str, breaks: list[int] | None, points: list[Point] | None, tmp_path: Path) -> None:
    """With every loader, and after a stop anywhere in an epoch, a process with another seed continues with its batches.

    The same holds for a checkpoint that any hook saves; it then repeats the unfinished batch.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check(name, tmp_path, breaks, points)
    warned = any("not exactly" in str(warning.message) for warning in told)
    assert warned == (name in ("workers", "stream, worker that stays"))


@pytest.mark.parametrize("num_steps", long_but([6], [4, 6, 8]))
def test_a_checkpoint_saved_after_the_fit(num_steps: int, tmp_path: Path) -> None:
    """A fit that max_steps ended, within an epoch or with one, goes on as one of more steps, and warns of nothing.

    It does not matter what the script does before it saves.
    """
    make, further = CASES["steps"]
    whole, begun, resumed = Module(make), Module(make), Module(make)
    fit(whole, tmp_path / "whole", seed=1, settings=further)
    pl.seed_everything(1)
    settings = {"max_steps": num_steps, "check_val_every_n_epoch": 9, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(tmp_path, precision="32-true", **settings)
    trainer.fit(begun)
    trainer.validate(begun, verbose=False)
    torch.rand(3)
    trainer.save_checkpoint(tmp_path / "after")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*resum")
        fit(resumed, tmp_path / "resumed", seed=9, settings=further, resume=str(tmp_path / "after"))
    assert [one for one in begun.seen if one[0] != "validation"] + resumed.seen == whole.seen


class OwnOrder:
    """A sampler with a generator that no resume restores."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(30).tolist())

    def __len__(self) -> int:
        return 30


def test_a_loader_of_other_data_begins_the_epoch_again(tmp_path: Path) -> None:
    """A position within an epoch means nothing for another number of samples. A warning says what happens instead.

    Another one names a sampler of the user's.
    """
    point: Point = ("batch end", 2)
    fit(
        Module(lambda: DataLoader(Plain(), 3), folder=tmp_path, points=[point]),
        tmp_path / "whole",
        seed=1,
        settings={"max_epochs": 1},
    )
    resumed = Module(lambda: DataLoader([torch.ones(1)] * 30, 3, sampler=OwnOrder()))  # type: ignore[arg-type]
    other = "a DataLoader with another number of samples or another batch size begins"
    with pytest.warns(UserWarning, match=r"\(here OwnOrder\)"), pytest.warns(UserWarning, match=other):
        fit(resumed, tmp_path / "resumed", seed=9, settings={"max_epochs": 1}, resume=str(tmp_path / "batch end-2"))
    assert len(resumed.seen) == 8


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
    fit(Module(lambda: DataLoader(Stream(), 2), breaks_at=2), tmp_path / "stream", seed=1, settings={})
    with pytest.warns(UserWarning, match="a stream that was read by workers is read without, or the reverse"):
        again = Module(lambda: DataLoader(Stream(), 2, num_workers=1))
        fit(again, tmp_path / "stream", seed=1, settings={"max_steps": 3}, resume="storage")


def test_a_fit_without_a_step_leaves_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed fit that ends at once leaves the training on storage, unless that has come to the fit's end."""

    def goes_on(module: Module, **limits: Any) -> bool:
        strategy, kept = SmartInfinityStrategy(tmp_path / "state", overlap="none"), len(caplog.records)
        trainer = quiet_trainer(tmp_path, strategy, limit_val_batches=0, precision="32-true", **limits)
        trainer.fit(module, ckpt_path=None if module.breaks_at else "storage")
        strategy.close()
        assert not module.seen
        told = "No optimizer step was taken" in "".join(record.message for record in caplog.records[kept:])
        assert told == bool(list(tmp_path.glob("state/*/*/state.bin")))
        return told

    make = shuffled()
    with pytest.raises(Broken):
        goes_on(Module(make, breaks_at=4), max_epochs=2)
    with pytest.raises(ConfigError, match="Leave fast_dev_run out"):
        goes_on(Module(make), fast_dev_run=2)
    for limits in ({"max_steps": 3}, {"max_epochs": 0}):
        assert goes_on(Module(make), **limits)
    assert not goes_on(Module(make), max_steps=4)


# ---- what was due, and what the uninterrupted fit would not have drawn


FOURS = shuffled()
"""Makes a loader with four batches."""


def saved_fit(root: Path, *points: Point, make: Callable[[], Any] = FOURS, **settings: Any) -> Module:
    """Return a module that was fitted for an epoch, by default, and saved at points."""
    module = Module(make, folder=root, points=points)
    fit(module, root / "saved", seed=1, settings={"max_epochs": 1, **settings})
    return module


def resumed_fit(root: Path, saved: str, *, make: Callable[[], Any] = FOURS, **settings: Any) -> Module:
    """Return a module that was fitted on from a saved point."""
    module = Module(make)
    # With the same seed: on it depends the order of an earlier version.
    fit(module, root / "resumed", seed=1, settings={"max_epochs": 1, **settings}, resume=str(root / saved))
    return module


def test_a_due_validation_on_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, although random states are not restored."""
    saved_fit(tmp_path, ("batch end", 4), limit_val_batches=1)
    monkeypatch.setattr(fit_record, "fits", lambda *_, **__: False)
    again = resumed_fit(tmp_path, "batch end-4", limit_val_batches=1)
    assert [what for what, *_ in again.seen] == ["validation"]


def test_gradients_that_a_checkpoint_leaves_out_are_warned_of(tmp_path: Path) -> None:
    """Only between the batches of a step. The second step of an epoch has its fourth and last batch alone."""
    points = [("batch end", number) for number in range(1, 5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved_fit(tmp_path, *points, ("epoch end", 1), accumulate_grad_batches=3)
    told = [str(warning.message) for warning in caught if "holds no gradients" in str(warning.message)]
    assert ["those of batch 0 of epoch 0" in told[0], "those of batches 0 to 1 of epoch 0" in told[1]] == [True, True]
    assert len(told) == 2
    with pytest.warns(UserWarning, match="saved after 2 of the 3 batches of a step, and holds no gradients"):
        resumed_fit(tmp_path, "batch end-2", accumulate_grad_batches=3)


class SavingWithinBatch(Module):
    """Saves a checkpoint within each batch, before its step and after it, and has running statistics."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FOURS, folder=folder)
        self.norm = nn.BatchNorm1d(1, affine=False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.save("stepped")


def test_a_batch_that_a_resumed_fit_repeats_is_warned_of(tmp_path: Path) -> None:
    """A fit repeats the batch within which its checkpoint was saved: with its step, or with its running statistics."""
    told = "within batch 1 of epoch 0, after its"
    with (
        pytest.warns(UserWarning, match=f"{told} optimizer step"),
        pytest.warns(UserWarning, match=f"{told} forward.*BatchNorm"),
    ):
        fit(SavingWithinBatch(tmp_path), tmp_path, seed=1, settings={"max_epochs": 1, "limit_train_batches": 2})


@pytest.mark.parametrize("point", [("epoch end", 1), ("batch end", 6)])
def test_checkpoints_of_earlier_versions(point: Point, tmp_path: Path) -> None:
    """A fit goes on in their order, to the bit at an epoch's end. Within an epoch Lightning replays it. Both warn."""
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="begun by an earlier version"):
        # Fits shuffle all batches, and checkpoints hold random states but no point of the fit.
        patch.setattr(TrainerFitRecord, "keeps_order", lambda _: False)
        patch.setattr(TrainerFitRecord, "_point", lambda _, random: random)
        straight = saved_fit(tmp_path, point, max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = resumed_fit(tmp_path, "-".join(map(str, point)), max_epochs=3)
    told = " ".join(str(warning.message) for warning in caught)
    assert "begun by an earlier version" in told and ("replays the epoch's batches" in told) == ("batch end" in point)
    if "epoch end" in point:
        assert again.seen == straight.seen[4:]


def test_random_numbers_of_workers_within_an_epoch_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stateful loader continues, but its workers draw from new seeds. A warning says so."""
    monkeypatch.setattr(StatefulLoader, "num_workers", 2, raising=False)
    saved_fit(tmp_path, ("batch end", 2), make=StatefulLoader)
    with pytest.warns(UserWarning, match="workers"):
        resumed_fit(tmp_path, "batch end-2", make=StatefulLoader)

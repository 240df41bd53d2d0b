"""The position of a Trainer's data loader within an epoch, for training records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_smartinfinity.resume.loader_position import (
    begin_epoch,
    is_of_other_data,
    is_position,
    keeping_position,
    keeps_position,
)
from lightning_smartinfinity.resume.random_states import global_states, restore_globals
from lightning_smartinfinity.zero3.untyped import ClientState

__all__ = ["Batches"]


class Batches:
    """A data loader that a Trainer iterates, prepared by accelerate or not.

    accelerate's ``DataLoaderShard`` fetches each batch from its ``base_dataloader`` one batch ahead. The batch fetched
    ahead has used random numbers from before the step that a record belongs to. So the position is that before this
    fetch, together with the random states of that moment; a resumed training fetches the batch again. accelerate calls
    ``state_dict`` of the base before each fetch ahead, and after the last batch.

    Args:
        loader: The loader.
        num_skipped: Number of batches of the epoch that the loader leaves out.
    """

    def __init__(self, loader: Any, *, num_skipped: int = 0) -> None:
        from accelerate.data_loader import DataLoaderShard

        # The class of a DataLoaderShard claims to be that of its base.
        self._fetches_ahead = issubclass(type(loader), DataLoaderShard)
        self._loader, self._num_skipped = loader, num_skipped
        self._base = loader.base_dataloader if self._fetches_ahead else loader
        if self._fetches_ahead or issubclass(type(loader), DataLoader):
            keeping_position(self._base)
        self._random: dict[str, Any] | None = None
        self._when_fetched: Callable[[], None] | None = None
        if self._fetches_ahead and self.has_position:
            self._base.state_dict = self._noted_state

    @property
    def has_position(self) -> bool:
        """Whether the loader can continue from a position. Otherwise, the Trainer skips the batches already used."""
        names = ("state_dict", "load_state_dict")
        is_loader = self._fetches_ahead or keeps_position(self._base)
        return is_loader and all(callable(getattr(self._base, name, None)) for name in names)

    def state(self) -> ClientState | None:
        """Return the position for :meth:`load`, between two steps; None if the loader has none."""
        if not self.has_position:
            return None
        before_fetch = self._fetches_ahead and self._random is not None
        state = self._loader.state_dict() if before_fetch else type(self._base).state_dict(self._base)
        if is_position(state):
            state = {**state, "num_fetched": state["num_fetched"] + self._num_skipped}
        return {"state": state, "random": self._random}

    def moved(
        self, saved: ClientState, *, sizes: tuple[int, int], window: int, steps: int
    ) -> tuple[ClientState, str] | None:
        """Return a position after the same samples with another batch size or dataset, and a warning about it.

        Args:
            saved: A result of :meth:`state`, from within an epoch.
            sizes: Batch size of the saved training and of this one.
            window: Number of batches of a step; the position is a multiple of it.
            steps: Number of batches of an epoch.

        Returns:
            The position and the warning's sentences. None if sizes and data are as before, or the state is the loader's
            own.
        """
        (before, now), state = sizes, saved["state"]
        if not (keeps_position(self._base) and is_position(state) and state["is_within"]):
            return None
        has_other_data = is_of_other_data(self._base, {**state, "batch_size": self._base.batch_size})
        if before == now and not has_other_data:
            return None
        num_used = state["num_fetched"] * before
        num_fetched = min(num_used // now, steps)
        num_fetched -= num_fetched % window if num_fetched < steps else 0
        again = num_used - num_fetched * now
        differences = [f"per_device_train_batch_size={before}, not {now}"] if before != now else []
        differences += ["another number of samples"] if has_other_data else []
        told = f"The interrupted training had {' and '.join(differences)}. "
        told += f"Each process had used {num_used} samples of the epoch, which "
        told += f"goes on after {num_fetched * now}" if num_fetched < steps else "ends"
        told += f", so that the last {again} are used again. " if again > 0 and num_fetched < steps else ". "
        if has_other_data:
            told += "Shuffled data have another order now: this epoch may repeat samples and leave out others. "
        return {**saved, "state": {**state, "num_fetched": num_fetched}}, told

    def load(self, saved: ClientState, *, is_over: bool, when_fetched: Callable[[], None]) -> None:
        """Make the next iteration continue from a position.

        Args:
            saved: A result of :meth:`state`.
            is_over: Whether the saved epoch is over, so that the next iteration begins an epoch.
            when_fetched: Function that restores the random states of after the first fetch; not called if the epoch is
                over.
        """
        if is_over:
            if keeps_position(self._base):
                self._base.load_state_dict(saved["state"])
                begin_epoch(self._base)
            return
        self._base.load_state_dict(saved["state"])
        if saved["random"] is not None:
            restore_globals(saved["random"])
            self._when_fetched = when_fetched

    def _noted_state(self) -> dict[str, Any]:
        if self._when_fetched is not None:
            when_fetched, self._when_fetched = self._when_fetched, None
            when_fetched()
        self._random = global_states()
        state: dict[str, Any] = type(self._base).state_dict(self._base)
        return state

"""The stage-3 optimizer that the engine builds: state on storage, checkpoints in DeepSpeed's format."""

from __future__ import annotations

import torch

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.checkpoints.formats import optimizer_state
from lightning_smartinfinity.zero3.optimizer.state_by_parameter import StateByParameter
from lightning_smartinfinity.zero3.untyped import SavedState

__all__ = ["SmartInfinityOptimizer"]


class SmartInfinityOptimizer(StateByParameter):
    """The complete stage-3 optimizer of this package."""

    def destroy(self) -> None:
        """Call the base class with an empty state, because it would search the state for pinned memory."""
        with replaced(self.optimizer, "state_on_storage", {}):
            super().destroy()

    # ---- checkpoints

    def checkpoint_event_prologue(self) -> None:
        """Call the base class and drain the step in flight: a checkpoint is about to be saved or loaded."""
        super().checkpoint_event_prologue()
        self.update.drain()

    def _rigid_state_dict(self) -> SavedState:
        return optimizer_state.state_dict(self)

    def _rigid_load_state_dict(self, state_dict: SavedState, load_optimizer_states: bool = True) -> None:
        optimizer_state.load_state_dict(self, state_dict, load_optimizer_states=load_optimizer_states)

    @torch.no_grad()
    def _restore_from_bit16_weights(self) -> None:
        """Set the masters to the partition's current values; moments and step counts stay."""
        self.update.drain()
        self.outside_writes.refresh_all()

    # ---- refused

    def offload_states(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no optimizer state in memory to move."""
        raise UnsupportedError(
            "offload_states does not work with the smart_infinity strategy.",
            "Remove the call: optimizer state is on storage already.",
        )

    def reload_states(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no offloaded state to move back."""
        raise UnsupportedError(
            "reload_states does not work with the smart_infinity strategy.",
            "Remove the call: optimizer state stays on storage.",
        )

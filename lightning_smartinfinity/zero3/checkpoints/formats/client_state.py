"""The state that a user saves beside the model. It shares a file and its keys with what DeepSpeed saves."""

from __future__ import annotations

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

__all__ = ["MODEL_KEY", "RESERVED_KEYS", "refuse_reserved", "user_state"]

MODEL_KEY = "smart_infinity_models"
"""Key under which a checkpoint describes the models of transformers in its module."""

RESERVED_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        SAVE_ID,
        RANK_KEY,
        MODEL_KEY,
    }
)
"""Keys of the file that users cannot choose."""


def refuse_reserved(state: SavedState) -> None:
    """Refuse entries that would replace DeepSpeed's own.

    Raises:
        UnsupportedError: There are such entries; the message names them.
    """
    reserved = sorted(RESERVED_KEYS & set(state))
    if reserved:
        raise UnsupportedError(
            f"The state's keys {', '.join(map(repr, reserved))} are names that DeepSpeed's checkpoints use themselves.",
            "Choose other names.",
        )


def user_state(client_state: SavedState) -> ClientState:
    """Return the user's entries of the state that an engine returns when it loads."""
    return {key: value for key, value in client_state.items() if key not in RESERVED_KEYS}

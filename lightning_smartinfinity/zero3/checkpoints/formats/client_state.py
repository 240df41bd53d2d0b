"""The state that a user saves beside the model, and DeepSpeed's loss scaler, which share a file.

The scaler is saved as numbers, so that no class has to be trusted when the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase

from lightning_smartinfinity.errors import CheckpointError, UnsupportedError
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import RANK_KEY, SAVE_ID
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

__all__ = [
    "GRADIENTS_LEFT_OUT",
    "MODEL_KEY",
    "RESERVED_KEYS",
    "loss_scaler_of",
    "numbers_of",
    "refuse_reserved",
    "user_state",
]


MODEL_KEY = "smart_infinity_models"
"""Key of a checkpoint's description of the transformers models in its module."""

GRADIENTS_LEFT_OUT = "smart_infinity_gradients_left_out"
"""Key of a checkpoint that was saved while gradients waited for a step."""

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
        GRADIENTS_LEFT_OUT,
    }
)
"""Keys of the file that users may not use."""


def refuse_reserved(state: SavedState) -> None:
    """Refuse entries that would replace DeepSpeed's own.

    Raises:
        UnsupportedError: The state has reserved keys; the message names them.
    """
    reserved = sorted(RESERVED_KEYS & set(state))
    if reserved:
        raise UnsupportedError(
            f"The state's keys {', '.join(map(repr, reserved))} are names that DeepSpeed's checkpoints use themselves.",
            "Choose other names.",
        )


def user_state(client_state: SavedState) -> ClientState:
    """Return the user's entries of the client state that an engine has loaded."""
    return {key: value for key, value in client_state.items() if key not in RESERVED_KEYS}


_DTYPE = "dtype"  # only fp16 has a dynamic scale
_NEEDED = {"dynamic", "cur_scale"}


def numbers_of(scaler: LossScalerBase) -> SavedState:
    """Return a loss scaler's numbers by name, from which :func:`loss_scaler_of` restores it."""
    return {name: value for name, value in vars(scaler).items() if name != _DTYPE}


def loss_scaler_of(saved: object) -> LossScalerBase:
    """Return a saved loss scaler, given its numbers or the object that DeepSpeed itself saves.

    Raises:
        CheckpointError: ``saved`` is neither.
    """
    if isinstance(saved, LossScalerBase):
        return saved
    numbers = saved if isinstance(saved, Mapping) else {}
    scaler = _dynamic() if numbers.get("dynamic") else LossScaler()
    known = {name: numbers[name] for name in numbers_of(scaler) if name in numbers}
    if not known.keys() >= _NEEDED or not all(isinstance(value, (bool, int, float)) for value in known.values()):
        raise CheckpointError(
            f"The checkpoint holds a {type(saved).__name__} in place of the numbers of a loss scaler.",
            "Use another checkpoint.",
        )
    vars(scaler).update(known)
    return scaler


def _dynamic() -> DynamicLossScaler:
    """Return a scaler with a dynamic scale, whose numbers are to be replaced."""
    return DynamicLossScaler(
        init_scale=1.0,
        scale_window=1,
        min_scale=1.0,
        delayed_shift=1,
        consecutive_hysteresis=False,
        dtype=torch.half,
    )

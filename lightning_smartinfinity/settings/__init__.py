"""Settings as frozen dataclasses, validated once at construction."""

from __future__ import annotations

from lightning_smartinfinity.settings.activations import ActivationOffload, activation_offload
from lightning_smartinfinity.settings.block_scaled import BlockScaled
from lightning_smartinfinity.settings.codec import CODEC, GradientCodec
from lightning_smartinfinity.settings.folders import LOCAL_FOLDER, launched_as, resolved_folder, storage_folders
from lightning_smartinfinity.settings.plan import PlanConfig, plan_config
from lightning_smartinfinity.settings.smartssd import MAX_CARD_NUMBER, SmartSSDConfig
from lightning_smartinfinity.settings.top_k import TopK
from lightning_smartinfinity.settings.transfer import (
    CARD_TASKLET_BYTES,
    HOST_TASKLET_BYTES,
    IO_TIMEOUT,
    JOB_NAME,
    NUM_BUFFERS,
    TransferConfig,
    transfer_config,
)

__all__ = [
    "CARD_TASKLET_BYTES",
    "CODEC",
    "HOST_TASKLET_BYTES",
    "IO_TIMEOUT",
    "JOB_NAME",
    "LOCAL_FOLDER",
    "MAX_CARD_NUMBER",
    "NUM_BUFFERS",
    "ActivationOffload",
    "BlockScaled",
    "GradientCodec",
    "PlanConfig",
    "SmartSSDConfig",
    "TopK",
    "TransferConfig",
    "activation_offload",
    "launched_as",
    "plan_config",
    "resolved_folder",
    "storage_folders",
    "transfer_config",
]

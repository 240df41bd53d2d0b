"""Settings as frozen dataclasses, validated once at construction."""

from __future__ import annotations

from lightning_smartinfinity.config.activations import ActivationOffload, activation_offload
from lightning_smartinfinity.config.folders import LOCAL_FOLDER, launched_as, resolved_folder, storage_folders
from lightning_smartinfinity.config.plan import PlanConfig, plan_config
from lightning_smartinfinity.config.smartssd import MAX_CARD_NUMBER, SmartSSDConfig, smartssd_config
from lightning_smartinfinity.config.transfer import (
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
    "HOST_TASKLET_BYTES",
    "IO_TIMEOUT",
    "JOB_NAME",
    "LOCAL_FOLDER",
    "MAX_CARD_NUMBER",
    "NUM_BUFFERS",
    "ActivationOffload",
    "PlanConfig",
    "SmartSSDConfig",
    "TransferConfig",
    "activation_offload",
    "launched_as",
    "plan_config",
    "resolved_folder",
    "smartssd_config",
    "storage_folders",
    "transfer_config",
]

"""The connection to DeepSpeed's ZeRO-3: engine, stage-3 optimizer, checkpoint format. The only importer of deepspeed.

This ``__init__`` and its imports load deepspeed inside functions only. Other modules (``engine``, ``optimizer``,
``checkpoints`` and their imports) load it at module level. An integration imports these when it sets up the model,
after :func:`prepare_environment` has set DeepSpeed's accelerator.
"""

from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.deepspeed_config import build_deepspeed_config
from lightning_smartinfinity.zero3.setup.environment import prepare_environment, require_descriptors

__all__ = [
    "OffloadSettings",
    "build_deepspeed_config",
    "prepare_environment",
    "require_descriptors",
]

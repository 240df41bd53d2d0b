"""Gradient compression on the way to the update: codecs, one file each, whose arithmetic is in the native core.

A codec turns one tasklet's gradient into fewer bytes before it crosses the shared channel; it is decoded next to the
update. ``transfer`` works it, ``plan`` predicts what it gains.
"""

from lightning_smartinfinity.compression.base import CODEC, GradientCodec
from lightning_smartinfinity.compression.block_scaled import BlockScaled
from lightning_smartinfinity.compression.top_k import TopK

__all__ = ["CODEC", "BlockScaled", "GradientCodec", "TopK"]

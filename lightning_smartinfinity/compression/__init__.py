"""Compression of gradients on the way to the update: one file for each codec, whose arithmetic is in the native core.

A codec turns one tasklet's gradient into fewer bytes before it crosses the shared channel; the update decodes it.
``transfer`` applies the codec, ``plan`` predicts what it gains.
"""

from lightning_smartinfinity.compression.base import CODEC, GradientCodec
from lightning_smartinfinity.compression.block_scaled import BlockScaled
from lightning_smartinfinity.compression.top_k import TopK

__all__ = ["CODEC", "BlockScaled", "GradientCodec", "TopK"]

"""Replaces torch's errors that ZeRO-3 causes by errors that name the cause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError

__all__ = ["naming_dtypes", "naming_partitions"]

_DTYPES = re.compile(
    r"same dtype|same data type|match weight dtype|mixed dtype|BFloat16|Half|expected scalar type|should be the same"
)
_EMPTY = re.compile(r"\(0\)|\[0\]|must be a matrix")


@contextmanager
def naming_dtypes(*, in_16_bit: bool) -> Iterator[None]:
    """Turn torch's errors about dtypes in this context into ours; with autocast, which is off here, they do not occur.

    Args:
        in_16_bit: Whether the training's precision is 16-bit.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        if not in_16_bit or isinstance(error, SmartInfinityError) or not _DTYPES.search(str(error)):
            raise
        raise UnsupportedError(
            f"An operation of forward failed by the dtypes of its inputs: {str(error).rstrip('.')}.",
            "Parameters and activations have the dtype of the training's precision, and autocast is off: cast what is "
            "added to activations, such as fp32 buffers, by value.to(x.dtype), or run under torch.autocast. Where "
            "torch has no such operation in 16 bit, use param.data.float().",
        ) from error


@contextmanager
def naming_partitions() -> Iterator[None]:
    """Turn torch's errors about tensors without elements into ours, within this context around backward."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SmartInfinityError) or not _EMPTY.search(str(error)):
            raise
        raise UnsupportedError(
            f"Backward met a parameter that ZeRO-3 has partitioned: {str(error).rstrip('.')}.",
            "Give a torch.autograd.Function of your own param.clone() in place of a parameter: torch does not ask "
            "parameters to answer there. Compute other terms outside of deepspeed.zero.GatheredParameters: parameters "
            "answer as whole there, and in backward, too.",
        ) from error

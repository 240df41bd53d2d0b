"""The top-K selection written in torch operations sends the same bytes as the native core."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.gradients.device_selection import top_k_payload, with_residual
from tests.helpers.native_testing import encode_gradient

DTYPES = {
    torch.float32: native.DType.FLOAT32,
    torch.bfloat16: native.DType.BFLOAT16,
    torch.float16: native.DType.FLOAT16,
}


def values_of(numel: int, seed: int) -> torch.Tensor:
    """Return random values with ties, zeros of both signs, subnormals and values beyond the range of 16-bit types."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    special = torch.tensor([0.5, -0.5, 0.0, -0.0, 1e-40, 7e4, -3.4e38, math.inf, -math.inf])
    chosen = torch.rand(numel, generator=generator) < 0.3
    picked = torch.randint(len(special), (numel,), generator=generator)
    return torch.where(chosen, special[picked], values)


def native_payload(
    values: torch.Tensor,
    ratio: float,
    dtype: torch.dtype,
    padding: list[tuple[int, int]],
    *,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
) -> bytes:
    """Return the native core's payload for one tasklet with one segment."""
    codec = native.TopK(ratio=ratio, value_dtype=DTYPES[dtype])
    buffer = np.zeros(codec.payload_bytes(values.numel()) // 4, np.uint32)
    segment = native.Segment(offset=0, numel=values.numel(), step=0, gradient=values.data_ptr())
    tasklet = native.Tasklet(
        index=0,
        numel=values.numel(),
        num_arrays=3,
        extent_bytes=1 << 20,
        read_file=0,
        read_offset=0,
        read_generation=0,
        write_file=0,
        write_offset=0,
        write_generation=1,
        segments=[segment],
        payload=buffer.ctypes.data,
        payload_bytes=buffer.nbytes,
        padding=padding,
        residual=0 if residual is None else residual.data_ptr(),
    )
    nbytes = encode_gradient(codec, tasklet, residual_scale=scale)
    return buffer.tobytes()[:nbytes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("numel", "ratio"),
    [(1, 0.5), (333, 1e-5), (333, 0.9), (65_536, 0.01), (65_536, 0.9), (65_537, 0.5), (140_001, 1e-5), (140_001, 0.01)],
)
def test_is_the_native_payload(numel: int, ratio: float, dtype: torch.dtype) -> None:
    """The payload equals the native one with ties, zeros, padding and values too large for their type."""
    values = values_of(numel, seed=numel)
    padding = [(numel // 2, numel // 4)] if numel > 3 else []
    taken = torch.ones(numel, dtype=torch.bool)
    for offset, length in padding:
        taken[offset : offset + length] = False
    payload = top_k_payload(values, ratio=ratio, value_dtype=dtype, taken=taken)
    assert payload.numpy().tobytes() == native_payload(values, ratio, dtype, padding)


def test_everything_is_zeros_too() -> None:
    """With a ratio of 1 every element except padding is sent, zeros included."""
    values = values_of(1000, seed=0)
    taken = torch.arange(1000) < 900
    payload = top_k_payload(values, ratio=1, value_dtype=torch.float32, taken=taken)
    assert payload.numpy().tobytes() == native_payload(values, 1, torch.float32, [(900, 100)])


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_what_was_not_sent_is_added_alike(scale: float) -> None:
    """Adding a scaled residual gives the native core's bits, also for overflow, subnormals and residuals of zero."""
    gradient, residual = values_of(5000, seed=1), values_of(5000, seed=2).clamp(-1e30, 1e30)
    gradient[:4], residual[:4] = torch.tensor([3e38, -3e38, 3e38, 1.0]), torch.tensor([3e38, -3e38, -3e38, -3.4e38])
    payload = top_k_payload(with_residual(gradient, residual, scale), ratio=0.9, value_dtype=torch.float32)
    assert payload.numpy().tobytes() == native_payload(gradient, 0.9, torch.float32, [], residual=residual, scale=scale)

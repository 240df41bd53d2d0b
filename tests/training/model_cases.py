"""Named cases of hard modules, for the tests on one and on two processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.helpers.hard_modules import (
    Adapted,
    Balanced,
    Case,
    Checkpointed,
    Containers,
    Large,
    Layers,
    Meta,
    Nested,
    Outputs,
    Penalty,
    Reused,
    Shapes,
    SometimesUsed,
    Teacher,
    Thawing,
    TiedThrice,
    TwoBackwards,
    UsedLate,
)

# In 16 bit a difference in the last bit of an update sometimes changes how a parameter is rounded.
IN_16_BIT = {"masters": 5e-3}
# The bucket is smaller than the weights, so that they leave before the next bias arrives.
SMALL_BUCKET = {"reduce_bucket_size": 16}


def keep_products() -> Any:
    """Return a selective checkpointing policy that keeps matrix products and recomputes everything else."""
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


STRUCTURES = {
    "a module used three times": Case(Reused, zero=SMALL_BUCKET),
    "a module in two parents": Case(Nested),
    "one weight in three places": Case(TiedThrice),
    "tensors of odd sizes and not contiguous": Case(partial(Shapes, scalars=True), zero={"sub_group_size": 40}),
    "tensors without a dimension, in bf16": Case(partial(Shapes, scalars=True), precision="bf16-mixed", **IN_16_BIT),
    "tensors without elements": Case(partial(Shapes, empty=True)),
    "LSTM, attention, parametrizations, padding, buffers": Case(Layers, masters=1e-4),
    "parameters in containers": Case(Containers),
    "nested outputs": Case(Outputs),
    "a frozen base with adapters": Case(Adapted, precision="bf16-true", **IN_16_BIT),
    "adapters, and an empty parameter group": Case(Adapted, clip=0.5, accumulate=2),
    "a teacher without gradient": Case(Teacher),
    "a tensor larger than ring and sub-group": Case(
        Large,
        zero={"sub_group_size": 5_000, "reduce_bucket_size": 1_000},
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 4},
    ),
}
_REENTRANT = partial(Checkpointed, use_reentrant=True)
CHECKPOINTS = {
    "reentrant, one bucket": Case(partial(_REENTRANT, outside=False), clip=0.5),
    "reentrant, small buckets": Case(_REENTRANT, clip=0.5, zero=SMALL_BUCKET),
    "reentrant, accumulating": Case(_REENTRANT, accumulate=3, clip=0.5, zero={"reduce_bucket_size": 100}),
    "reentrant, bf16": Case(_REENTRANT, precision="bf16-mixed", clip=0.5, zero=SMALL_BUCKET, **IN_16_BIT),
    "reentrant, bf16, accumulating": Case(_REENTRANT, precision="bf16-mixed", accumulate=2, **IN_16_BIT),
    "not reentrant": Case(partial(Checkpointed, use_reentrant=False), accumulate=2, zero=SMALL_BUCKET),
    "selective": Case(partial(Checkpointed, use_reentrant=False, context_fn=keep_products), zero=SMALL_BUCKET),
}
UNUSED = {
    "in fp32": Case(SometimesUsed, steps=5),
    "by another module": Case(UsedLate, steps=4),
    "by another module, in bf16 beside a batch norm": Case(UsedLate, steps=4, precision="bf16-mixed", **IN_16_BIT),
    "because they are frozen then": Case(Thawing),
    "in bf16": Case(SometimesUsed, steps=5, precision="bf16-mixed", **IN_16_BIT),
    "in fp16": Case(SometimesUsed, steps=5, precision="16-mixed", **IN_16_BIT),
    "by one micro-batch": Case(partial(SometimesUsed, micro_batches=2), steps=5, accumulate=2),
    "by one micro-batch in bf16": Case(
        partial(SometimesUsed, micro_batches=2), steps=5, accumulate=2, precision="bf16-true", **IN_16_BIT
    ),
}
GRAPHS = {
    "one forward, two backwards": Case(TwoBackwards),
    "a gradient penalty": Case(Penalty),
    "a gradient penalty in bf16": Case(Penalty, precision="bf16-mixed", **IN_16_BIT),
    "losses balanced by their slopes": Case(Balanced, accumulate=2),
    "a step of gradient descent inside the loss": Case(Meta),
}
CASES: dict[str, Case] = {**STRUCTURES, **CHECKPOINTS, **UNUSED, **GRAPHS}

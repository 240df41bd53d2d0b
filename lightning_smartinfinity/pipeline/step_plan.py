"""The description of one optimizer step by its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.layout.batches import Link
from lightning_smartinfinity.pipeline.layout.tensors import Flat
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory

__all__ = ["StepPlan"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The parameters that one optimizer step updates, their gradients and the hyperparameters.

    Args:
        active: bool[num_parameters]: which parameters have a gradient; the others are left as they are, as in torch.
        gradients: Host memory of each sub-group's gradients, in sub-group order (``GradientArena.flats()``).
        outputs: The parameters. fp32 parameters in host or CUDA memory serve as master weights. bf16 parameters serve
            as their upper halves if the state format stores the remainders. The step updates the values that are there
            when it begins.
        groups: The optimizer's ``param_groups``, read once when the step begins.
        gradient_scale: Factor on every gradient before the update: one over the combined loss and clipping scale.
        compressed: Memory for compressed gradients; None means no compression.
        loss_scale: Loss scale of the gradients; the residual is unscaled.
        window: Returns what the update of a tasklet needs to know of its gradient, given its index and whether nobody
            needs the gradient afterwards; None: all gradients stay in memory.
        link: Link to the CUDA device on which parameters are used and gradients made, and which may be behind the host;
            None: there is none.
        first_uses: int64[num_parameters]: tasklets start in the order of the smallest of these numbers among their
            parameters; None means partition order. It changes no result.
    """

    active: NDArray[np.bool_]
    gradients: Sequence[Flat]
    outputs: ParameterMemory
    groups: Sequence[Mapping[str, Any]]
    gradient_scale: float = 1.0
    compressed: CompressedGradients | None = None
    loss_scale: float = 1.0
    window: Callable[[int, bool], native.GradientWindow | None] | None = None
    link: Link | None = None
    first_uses: NDArray[np.int64] | None = None

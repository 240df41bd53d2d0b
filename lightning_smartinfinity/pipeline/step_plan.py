"""The caller's description of one optimizer step."""

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
        active: bool[num_parameters]: which parameters have a gradient. The others do not change, as in torch.
        gradients: Host memory of each sub-group's gradients, in sub-group order (``GradientArena.flats()``).
        outputs: The parameters. fp32 parameters in host or CUDA memory serve as master weights. bf16 parameters serve
            as their upper halves if the state format stores the remainders. The step updates the values present when it
            begins.
        groups: The optimizer's ``param_groups``, read once when the step begins.
        gradient_scale: Factor on every gradient before the update: one over the combined loss and clipping scale.
        compressed: Memory for compressed gradients; None means no compression.
        loss_scale: Loss scale of the gradients; the residual is unscaled.
        window: Returns the gradient window of a tasklet, given its index and whether the update is the gradient's last
            use. None means that all gradients stay in memory.
        arrived: Returns the points after which the gradients that have been collected so far are in their host memory;
            None means that they are there already.
        link: Link to the CUDA device that uses the parameters and computes the gradients, asynchronously to the host;
            None means there is none.
        first_uses: int64[num_parameters]: numbers that order the parameters by first use. Tasklets start in the order
            of the smallest number among their parameters; None means partition order. The order changes no result.
    """

    active: NDArray[np.bool_]
    gradients: Sequence[Flat]
    outputs: ParameterMemory
    groups: Sequence[Mapping[str, Any]]
    gradient_scale: float = 1.0
    compressed: CompressedGradients | None = None
    loss_scale: float = 1.0
    window: Callable[[int, bool], native.GradientWindow | None] | None = None
    arrived: Callable[[], Sequence[native.ReadyPoint]] | None = None
    link: Link | None = None
    first_uses: NDArray[np.int64] | None = None

"""A link to the fake CUDA driver, with tensors that count as device tensors and a stream that stands for torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from tests.native.fake_cuda import FakeCuda
from tests.pipeline.harness import Case, Run

__all__ = ["CudaRun", "FakeLink"]


class FakeLink(CudaLink):
    """A link whose "device memory" is host memory.

    Only work on the user's stream is done in that stream's order.
    """

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__(0)
        self.fake = fake
        self.user_stream = fake.stream()
        self.streams = [self.user_stream]
        self._on_device: list[torch.Tensor] = []

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Treat the tensor and its views as device tensors from now on."""
        self._on_device.append(tensor)
        return tensor

    def use_other_stream(self) -> None:
        """Make another stream the current one."""
        self.user_stream = self.fake.stream()
        self.streams.append(self.user_stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(held.untyped_storage().data_ptr() == storage for held in self._on_device)

    def torch_stream(self) -> int:
        return self.user_stream

    def copy(self, tensor: torch.Tensor, *, us: int = 0) -> torch.Tensor:
        """Start a copy of fp32 values on the user's stream and return the tensor that will hold them."""
        copied = self.on_device(torch.full_like(tensor, torch.nan))
        self.fake.kernel(self.user_stream, copied.numpy(), tensor.numpy(), us=us)
        return copied

    def wait(self) -> None:
        """Wait until the user's streams have done all their work."""
        for stream in self.streams:
            self.fake.wait(stream)

    def close(self) -> None:
        """Destroy the user's streams."""
        for stream in self.streams:
            self.fake.destroy(stream)


class CudaRun(Run):
    """A run whose gradients are on the fake device, and its partition, too, if that is wanted."""

    def __init__(self, folder: Path, case: Case, link: FakeLink, *, on_device: bool = True, **options: Any) -> None:
        self.link = link
        self.on_device = on_device
        super().__init__(folder, case, **options)

    def make_arena(self) -> GradientArena:
        return GradientArena(self.layout, dtype=self.case.gradient_dtype, link=self.link)

    def send(self, parameter: int, gradient: torch.Tensor) -> None:
        super().send(parameter, self.link.on_device(gradient))

    def outputs(self) -> ParameterMemory:
        if not self.on_device:
            return super().outputs()
        return self.link.partition([self.link.on_device(tensor) for tensor in self.partition])

    def plan(self) -> StepPlan:
        return replace(super().plan(), link=self.link)

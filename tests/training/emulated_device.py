"""A CUDA device for trainings on machines without one: torch's tensors are the CPU's, and the driver is the fake one.

Everything of ours runs as on a device: gradients are copied into the arena, and parameters to and from the slots, by
streams of the fake driver, which do so late. The host does not wait for it except where ours says so. Torch itself
computes at once.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightning_smartinfinity.transfer import arena
from lightning_smartinfinity.zero3 import storage_optimizer
from lightning_smartinfinity.zero3.parameters import partition
from lightning_smartinfinity.zero3.parameters.partition import Partition
from lightning_smartinfinity.zero3.step.gradient_path import GradientPath
from tests.native.fake_cuda import FakeCuda
from tests.transfer.fake_link import FakeLink

__all__ = ["EmulatedDevice"]

_NUM_STREAMS = 3


class EmulatedDevice(FakeLink):
    """The link of trainings in this process, to a device on which gradients lie, and parameters unless offloaded.

    Args:
        fake: The fake driver.
        seed: Of the delays, and of the streams on which torch seems to work.
    """

    def __init__(self, fake: FakeCuda, *, seed: int) -> None:
        super().__init__(fake)
        for _ in range(1, _NUM_STREAMS):
            self.use_other_stream()
        fake.delay(seed, 1_000)
        self._random = random.Random(seed)
        self._nothing = np.zeros(1, np.float32)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, offloads: bool = False) -> None:
        """Let trainings use this device until the patches are undone.

        Args:
            monkeypatch: Makes and undoes the patches.
            offloads: Whether parameters lie in host memory while nothing computes with them.
        """
        monkeypatch.setattr(storage_optimizer, "link_to", lambda device: self)
        monkeypatch.setattr(partition, "link_to", lambda device: self)
        if not offloads:
            monkeypatch.setattr(Partition, "lies_in_host_memory", False)
        monkeypatch.setattr(arena, "_is_plain", lambda gradient: False)

    def holds(self, tensor: torch.Tensor) -> bool:
        return True

    def torch_stream(self) -> int:
        self.user_stream = self._random.choice(self._streams)
        return self.user_stream

    def points(self) -> list[object]:  # type: ignore[override]
        # The device is behind the host.
        late = self._random.randrange(2_000)
        self.fake.kernel(self.torch_stream(), self._nothing, self._nothing, us=late)
        return [*super().points()]

    def keep(self, tensor: torch.Tensor) -> None:
        super().keep(tensor)
        if not GradientPath.bypasses_buckets:  # the bucket's memory is used again, which torch would do on a stream
            self.wait()

    def give(self) -> None:
        super().give()
        self.wait()

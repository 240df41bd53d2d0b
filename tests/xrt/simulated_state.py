"""Keeps a partition in the memory of the C simulation, as card and host hold it on storage, tasklet by tasklet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.hls.simulation import Buffer, Simulation, aligned
from tests.hls.tasklet import GROUP, PADDING, Form, Tasklet, item_bytes, rounded_up, stored_in
from tests.native.stored import Array, Run, StoredState

__all__ = ["SimulatedState"]


class SimulatedState:
    """The tasklets of a stored partition, as a card's memory would hold them.

    Args:
        simulation: Simulation of the kernels.
        stored: The stored partition, which decides the tasklets and is read for comparison.
        form: Form of all gradients and parameters.
        arrays: The initial state, fp32.
    """

    def __init__(self, simulation: Simulation, stored: StoredState, form: Form, arrays: Sequence[Array]) -> None:
        self._simulation = simulation
        self._stored = stored
        self._form = form
        self._arrays = [self._memory(index, arrays) for index in range(stored.num_tasklets)]

    def update(self, runs: Sequence[Run], steps: Sequence[Any], parameter: Array) -> None:
        """Update as a batch does, by an error-free run of the kernel for each of a tasklet's groups.

        Args:
            runs: Runs that all have a step and cover the partition.
            steps: Steps of the runs.
            parameter: Where the updated parameters go.
        """
        for index, arrays in enumerate(self._arrays):
            numel, offset = self._stored.numel_of(index), index * self._stored.tasklet_numel
            memory = aligned(rounded_up(numel, GROUP) * item_bytes(self._form.parameter))
            gradient = self._gradient(index, runs, self._stored.payloads)
            tasklet = Tasklet(steps[0], numel, self._form, arrays[0].view(np.float32), gradient, arrays, memory)
            for run in runs:
                first, last = max(run.offset - offset, 0), min(run.offset + run.numel - offset, numel)
                if first < last:
                    status = tasklet.run_words(self._simulation, tasklet.words(first, last, step=steps[run.step]))
                    assert status["errors"] == 0 and status["count"] == last - first
                    part = slice(offset + first, offset + last)
                    parameter[part] = memory.view(parameter.dtype)[first:last]

    def assert_same(self) -> None:
        """Assert that the memory equals the files bit for bit, even in NaNs and zeros."""
        for index, arrays in enumerate(self._arrays):
            numel = self._stored.numel_of(index)
            for array, region in zip(arrays, self._stored.regions(index), strict=True):
                np.testing.assert_array_equal(array[: 4 * numel], region)

    def _memory(self, index: int, arrays: Sequence[Array]) -> list[Buffer]:
        begin, numel = index * self._stored.tasklet_numel, self._stored.numel_of(index)
        memory = [aligned(4 * rounded_up(numel, PADDING)) for _ in arrays]
        for target, array in zip(memory, arrays, strict=True):
            target[: 4 * numel] = array[begin : begin + numel].view(np.uint8)
        return memory

    def _gradient(self, index: int, runs: Sequence[Run], payloads: Mapping[int, Array]) -> Buffer:
        """Return a tasklet's compressed gradient, or the dense one that its runs have."""
        if index in payloads:
            return stored_in(payloads[index], payloads[index].size)
        offset, numel = index * self._stored.tasklet_numel, self._stored.numel_of(index)
        parts = [
            run.gradient[max(offset - run.offset, 0) : max(offset + numel - run.offset, 0)][: run.numel]
            for run in runs
            if run.gradient is not None
        ]
        return stored_in(np.concatenate(parts), rounded_up(numel, GROUP))

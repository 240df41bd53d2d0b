"""A partition that a card updates, beside one of the same content that the host updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd.discovery.cards import emulated_card
from lightning_smartinfinity.devices.smartssd.pyxrt_binding import PyxrtBinding
from lightning_smartinfinity.native import Batch, Card, CardOptions, Failure, Operation, Pipeline, StateFile
from tests.helpers.card_runs import setup_of
from tests.helpers.golden import ARRAYS as ARRAYS_OF
from tests.helpers.golden import STEPS, random_arrays
from tests.helpers.waiting import await_that
from tests.native.stored import Array, Run, StoredState, align, takes_direct
from tests.xrt.cards import EmulatedCards

_KERNELS = {getattr(native, rule.step): rule.kernel for rule in RULES}


def bound(cards: EmulatedCards, card: int = 0) -> PyxrtBinding:
    """Return Python's binding of a card, whose calls a test can change. The module pyxrt has to be there."""
    return PyxrtBinding(emulated_card(card), setup_of(1, cards.build.xclbin).xclbin, num_cards=1)


@dataclass
class CardState:
    """Two files of equal content with a pipeline for each: a card's, and the host's.

    Args:
        stored: The card's file, with a host's pipeline for work that a card does not do.
        host: The host's file.
        pipeline: The card's pipeline.
    """

    stored: StoredState
    host: StoredState
    pipeline: Pipeline

    def write(self, *arrays: Array) -> None:
        """Write the state of both files."""
        for side in (self.stored, self.host):
            side.write(*arrays)

    def submit(self, runs: Sequence[Run], steps: Sequence[Any]) -> None:
        """Start the card's batch."""
        self.pipeline.submit(self.stored.update_batch(runs, steps))

    def finish(self) -> Failure | None:
        """End the batch, and commit it if it did not fail."""
        failure = self.pipeline.finish()
        if failure is None:
            self.stored.generation += 1
            self.stored.place = 1 - self.stored.place
        return failure

    def update(self, runs: Sequence[Run], steps: Sequence[Any]) -> Failure | None:
        self.submit(runs, steps)
        return self.finish()

    def redo(self, runs: Sequence[Run], steps: Sequence[Any]) -> None:
        """Let the host do what the card left undone of its last batch, from the place that is untouched."""
        finished = self.pipeline.finished()
        whole = self.stored.update_batch(runs, steps)
        unfinished = [tasklet for index, tasklet in enumerate(whole.tasklets) if index not in finished]
        assert unfinished
        codec, scale = self.stored.codec, self.stored.residual_scale
        self.stored.pipeline.submit(Batch(Operation.UPDATE, unfinished, list(steps), codec=codec, residual_scale=scale))
        assert self.stored.finish() is None

    def assert_same(self) -> None:
        """Assert that every extent of the last generation is equal, byte for byte."""
        assert self.stored.place == self.host.place
        contents = [np.fromfile(side.paths[0], np.uint8) for side in (self.stored, self.host)]
        for index in range(self.stored.num_tasklets):
            begin = self.stored.extent_offset(index, self.stored.place)
            found, expected = (content[begin : begin + self.stored.extent_bytes_of(index)] for content in contents)
            np.testing.assert_array_equal(found, expected)


@contextmanager
def card_state(
    folder: Path,
    cards: EmulatedCards,
    step: object,
    numel: int,
    *,
    tasklet_numel: int = 0,
    binding: PyxrtBinding | None = None,
    card: int = 0,
    gradient_buffer_bytes: int = 0,
    parameter_bytes: int = 0,
    timeout_ms: int = 60_000,
    gradient_path: Path | None = None,
    num_buffers: int = 3,
    compute_threads: int = 2,
) -> Iterator[CardState]:
    """Yield a partition for the rule of a step.

    Args:
        folder: Folder of the files.
        cards: The machine's cards.
        step: A step of the rule.
        numel: Number of elements.
        tasklet_numel: Elements of all tasklets but the last; 0 means that there is one tasklet.
        binding: How the card is called; None: by XRT's library.
        card: Which card.
        gradient_buffer_bytes: As in CardOptions; 0 means enough for fp32.
        parameter_bytes: Likewise.
        timeout_ms: As in CardOptions.
        gradient_path: The file that gradients go through, if they do; made unless it exists.
        num_buffers: Number of the pipeline's buffers.
        compute_threads: Number of the pipeline's compute threads.
    """
    num_arrays = len(ARRAYS_OF[type(step)])
    sides = []
    for name in (f"card-{card}", f"host-{card}"):
        (folder / name).mkdir(parents=True)
        sides.append(StoredState(folder / name, numel, tasklet_numel=tasklet_numel, num_arrays=num_arrays))
    stored, host = sides
    opened = Card(binding) if binding else Card.open(card, xclbin=str(cards.build.xclbin))
    largest = align(4 * stored.tasklet_numel)
    gradient_file = None
    if gradient_path is not None:
        exists = gradient_path.exists()
        if not exists:
            gradient_path.write_bytes(bytes(num_buffers * largest))
        gradient_file = StateFile(str(gradient_path), direct=not exists and takes_direct(folder))
    pipeline = Pipeline(
        files=stored.files,
        identity=stored.identity,
        buffer_bytes=stored.extent_bytes,
        num_buffers=num_buffers,
        compute_threads=compute_threads,
        card=CardOptions(
            card=opened,
            kernel=_KERNELS[type(step)],
            gradient_buffer_bytes=gradient_buffer_bytes or largest,
            parameter_bytes=parameter_bytes or largest,
            timeout_ms=timeout_ms,
            gradient_file=gradient_file,
        ),
    )
    opened.close()
    with stored, host:
        yield CardState(stored, host, pipeline)
        pipeline.close()


# ---- a small partition whose card fails: the host does the rest, and then the card works again


STEP = STEPS["adamw"]
NUMEL, TASKLET = 4 * 1_000 + 5, 1_000
GRADIENT, *ARRAYS = random_arrays(STEP, NUMEL, 11, special=False)


@contextmanager
def small_state(folder: Path, cards: EmulatedCards, **settings: Any) -> Iterator[CardState]:
    """Yield a small partition with some state, in five tasklets unless the settings of its card say otherwise."""
    with card_state(folder, cards, STEP, NUMEL, **{"tasklet_numel": TASKLET, **settings}) as state:
        state.write(*ARRAYS)
        yield state


def runs_of(parameter: Array) -> list[Run]:
    """Return one run over the whole partition, into these parameters."""
    return [Run(0, NUMEL, 0, GRADIENT, parameter=parameter)]


def fail(state: CardState, kind: str = "device") -> tuple[Failure, Array]:
    """Run a batch that must fail in this way; return the failure and the parameters so far."""
    parameter = np.zeros(NUMEL, np.float32)
    failure = state.update(runs_of(parameter), [STEP])
    assert failure is not None and failure.kind == kind
    return failure, parameter


def make_good(state: CardState, parameter: Array) -> None:
    """Let the host do the rest, and assert that everything is as if the card had done it."""
    state.redo(runs_of(parameter), [STEP])
    _assert_like_host(state, parameter)


def succeed(state: CardState) -> None:
    """Run a batch that must not fail, once all that was given up has returned, which has changed nothing."""
    await_that(lambda: not state.pipeline.busy)
    state.assert_same()
    parameter = np.zeros(NUMEL, np.float32)
    assert state.update(runs_of(parameter), [STEP]) is None
    _assert_like_host(state, parameter)


def _assert_like_host(state: CardState, parameter: Array) -> None:
    expected = np.zeros(NUMEL, np.float32)
    assert state.host.work(Operation.UPDATE, runs_of(expected), [STEP]) is None
    np.testing.assert_array_equal(parameter, expected)
    state.assert_same()

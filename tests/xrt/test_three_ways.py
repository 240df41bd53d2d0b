"""Host, C simulation and emulated SmartSSD give the same bits at every step, for every optimizer and gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity.native import DType, Operation
from tests.helpers.card_runs import OPTIMIZERS, cards, pipelines, same_as_host, settled_host
from tests.helpers.compressed import Codes, build
from tests.helpers.golden import encode, flush
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject
from tests.helpers.runif import RunIf
from tests.hls.simulation import Buffer, Library, Simulation, aligned
from tests.hls.tasklet import GROUP, PADDING, Form, Tasklet, item_bytes, rounded_up, stored_in
from tests.native.stored import Array, Run, StoredState
from tests.pipeline.harness import Case, complete_tasklets, everything, running
from tests.pipeline.harness import Run as HandlerRun
from tests.xrt.card_state import card_state
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

# The NaN that an x86 makes itself. No other NaN ever occurs, so every order of operands gives this one.
NAN = np.array(0xFFC00000, np.uint32).view(np.float32)
NAN_BITS = {DType.FLOAT16: 0xFE00, DType.BFLOAT16: 0xFFC0}
FINITE = np.array([0.0, -0.0, 1e-45, -1e-40, 1.1754942e-38, 1.1754944e-38, -1.2e-38, 6e-8, -3e-8], np.float32)
SPECIAL = np.concatenate([FINITE, np.array([np.inf, -np.inf, NAN, 3e38, -3e38, 65504, 65520], np.float32)])
RATIO = 0.01
FORMS = {
    **{f"dense {dtype.name.lower()}": Form(dtype, dtype) for dtype in DType},
    **{f"sparse {dtype.name.lower()}": Form(dtype, dtype, RATIO) for dtype in DType},
    **{f"8 bits {dtype.name.lower()}": Form(DType.FLOAT32, dtype, block_scaled=True) for dtype in DType},
}
# Every optimizer with one dtype of each kind of gradients, and every form with at least one optimizer.
USUAL = [
    (optimizer, form)
    for row, optimizer in enumerate(OPTIMIZERS)
    for column, form in enumerate(FORMS)
    if (row + column) % 3 == 0
]

Steps = list[Any]


@dataclass(frozen=True)
class Training:
    """Steps of one optimizer on one kind of gradients.

    Attributes:
        optimizer: One of :data:`OPTIMIZERS`.
        form: Form of gradients and parameters.
        numel: Number of elements, in three tasklets, none of them whole beats. Two parameter groups meet in the second.
    """

    optimizer: str
    form: Form
    numel: int

    @property
    def tasklet_numel(self) -> int:
        return self.numel * 2 // 5 | 1

    def steps(self, number: int) -> Steps:
        """Return the scalars of both groups at a step, numbered from 1."""
        case = Case(**OPTIMIZERS[self.optimizer])
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **options} for options in case.options]
        optimizer = case.optimizer(groups, **case.defaults)
        return [
            case.rule.scalars(case.rule.snapshot(group), step=number, gradient_scale=0.25)
            for group in optimizer.param_groups
        ]

    def first_arrays(self) -> list[Array]:
        """Return the initial master weights and the rest of the state, with values of all kinds among them."""
        random = np.random.default_rng(0)
        arrays = [values_of(random, self.numel) for _ in Case(**OPTIMIZERS[self.optimizer]).rule.arrays]
        if self.optimizer == "rmsprop":
            _, square_avg, momentum_buffer, grad_avg = arrays
            np.abs(square_avg, out=square_avg, where=~np.isnan(square_avg))
            bound = np.float32(0.9) * np.sqrt(np.nan_to_num(square_avg))  # otherwise variances would be negative
            # The second group does not use these: nothing would flush them.
            arrays[2:] = flush(momentum_buffer), flush(np.clip(grad_avg, -bound, bound))
        elif self.optimizer != "sgd":
            np.abs(arrays[-1], out=arrays[-1], where=~np.isnan(arrays[-1]))
        return arrays

    def dense(self, number: int) -> Array:
        """Return the gradient of a step, as stored."""
        return stored(values_of(np.random.default_rng(number), self.numel), self.form.gradient)

    def payloads(self, number: int) -> dict[int, Array]:
        """Return the compressed gradients of a step, by tasklet."""
        random, payloads = np.random.default_rng(number), {}
        for index, begin in enumerate(range(0, self.numel, self.tasklet_numel)):
            numel = min(self.tasklet_numel, self.numel - begin)
            if self.form.block_scaled:
                payloads[index] = np.frombuffer(codes_of(random, numel).payload().tobytes(), np.uint8)
                continue
            positions = np.flatnonzero(random.random(numel, np.float32) < RATIO)
            values = stored(values_of(random, positions.size), self.form.gradient)
            content = build(positions, values, numel, self.form.gradient).tobytes()
            payloads[index] = np.frombuffer(content, np.uint8)
        return payloads

    def runs(self, gradient: Array | None, parameter: Array) -> list[Run]:
        border = self.numel // 2 + 3
        return [
            Run(
                begin,
                end - begin,
                group,
                gradient=None if gradient is None else gradient[begin:end],
                gradient_dtype=self.form.gradient,
                parameter=parameter[begin:],
                parameter_dtype=self.form.parameter,
            )
            for group, (begin, end) in enumerate(((0, border), (border, self.numel)))
        ]


def codes_of(random: np.random.Generator, numel: int) -> Codes:
    """Return codes of scales around one, with some blocks of the smallest and the largest scales."""
    exponents = random.integers(110, 128, -(-numel // 256), np.uint8)
    exponents[3::50], exponents[5::50] = random.integers(1, 9), random.integers(240, 249)
    return Codes(exponents, random.integers(-127, 128, numel, np.int8))


def values_of(random: np.random.Generator, numel: int) -> Array:
    """Return normal values with infinities, NaNs and subnormals between them, and elsewhere subnormals alone."""
    values = random.standard_normal(numel, np.float32)
    for first, others in ((0, SPECIAL), (8, FINITE)):
        values[first::16] = random.choice(others, values[first::16].size)
    return values


def stored(values: Array, dtype: DType) -> Array:
    """Return values as stored in memory, with a single kind of NaN, of which torch makes several."""
    found = encode(values, dtype)
    if dtype in NAN_BITS:
        found[np.isnan(values)] = np.uint16(NAN_BITS[dtype]).view(np.int16)
    return found


def simulated(
    simulation: Simulation, stored: StoredState, form: Form, runs: Sequence[Run], steps: Steps, parameter: Array
) -> list[list[Buffer]]:
    """Update what is stored as a batch does, by an error-free run of the kernel for each of a tasklet's groups.

    Args:
        simulation: Simulation of the kernels.
        stored: The stored partition, which stays as it is.
        form: Form of all gradients and parameters.
        runs: Runs that all have a step and cover the partition.
        steps: Steps of the runs.
        parameter: Where the updated parameters go.

    Returns:
        The arrays of each tasklet, as they should be stored then.
    """
    updated = []
    for index in range(stored.num_tasklets):
        numel, offset = stored.numel_of(index), index * stored.tasklet_numel
        arrays = [stored_in(region, 4 * rounded_up(numel, PADDING)) for region in stored.regions(index)]
        memory = aligned(rounded_up(numel, GROUP) * item_bytes(form.parameter))
        if index in stored.payloads:
            gradient = stored_in(stored.payloads[index], stored.payloads[index].size)
        else:
            whole = np.concatenate([run.gradient for run in runs if run.gradient is not None])
            gradient = stored_in(whole[offset : offset + numel], rounded_up(numel, GROUP))
        tasklet = Tasklet(steps[0], numel, form, arrays[0].view(np.float32), gradient, arrays, memory)
        for run in runs:
            first, last = max(run.offset - offset, 0), min(run.offset + run.numel - offset, numel)
            if first < last:
                status = tasklet.run_words(simulation, tasklet.words(first, last, step=steps[run.step]))
                assert status["errors"] == 0 and status["count"] == last - first
                parameter[offset + first : offset + last] = memory.view(parameter.dtype)[first:last]
        updated.append([array[: 4 * numel] for array in arrays])
    return updated


@pytest.mark.parametrize(
    ("numel", "num_steps"), [(170_003, 5), pytest.param(1 << 20, 50, marks=pytest.mark.long)], ids=["short", "long"]
)
@pytest.mark.parametrize(("optimizer", "form"), long_but(USUAL, itertools.product(OPTIMIZERS, FORMS)))
def test_the_same_bits(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    sequential: Library,
    optimizer: str,
    form: str,
    numel: int,
    num_steps: int,
) -> None:
    """State files agree byte for byte, and parameters bit for bit, after each step."""
    training = Training(optimizer, FORMS[form], numel)
    stored_type = np.float32 if training.form.parameter is DType.FLOAT32 else np.int16
    places = [np.zeros(numel, stored_type) for _ in range(3)]
    with card_state(
        tmp_path, emulated_cards, training.steps(1)[0], numel, tasklet_numel=training.tasklet_numel
    ) as state:
        state.write(*training.first_arrays())
        for number in range(1, num_steps + 1):
            gradient = None if training.form.is_compressed else training.dense(number)
            payloads = training.payloads(number) if training.form.is_compressed else {}
            state.stored.payloads = state.host.payloads = payloads
            steps = training.steps(number)
            on_card, on_host, in_simulation = (training.runs(gradient, place) for place in places)
            state.submit(on_card, steps)
            updated = simulated(sequential, state.host, training.form, in_simulation, steps, places[2])
            assert state.finish() is None
            assert state.host.work(Operation.UPDATE, on_host, steps) is None
            state.assert_same()
            for index, arrays in enumerate(updated):  # even NaNs and zeros
                np.testing.assert_array_equal(arrays, state.host.regions(index))
            for other in places[1:]:
                np.testing.assert_array_equal(other.view(np.uint8), places[0].view(np.uint8))
        assert finite_and_not(np.concatenate([region.view(np.float32) for region in state.host.regions()]))
    assert emulated_cards.counter("runs_completed") == 4 * num_steps


def finite_and_not(values: Array) -> bool:
    """Return whether most values are finite, some are infinite or NaN, and none is subnormal, as all were flushed."""
    finite = np.isfinite(values)
    tiny = (values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)
    return bool(0.5 < finite.mean() < 1 and not tiny.any())


# ---- cards at random speeds, used in random orders, give the host's bits whatever comes first


NUM_CARDS = 2
FAULTS = ("error", "abort", "submit", "sync")


def slow_down(random: np.random.Generator, emulated_cards: EmulatedCards) -> None:
    """Give each card's kernels and syncs a random time of their own, up to a millisecond, or none."""
    emulated_cards.reset()
    for card in range(NUM_CARDS):
        emulated_cards.set("latency_us", int(random.integers(0, 3)) * int(random.integers(0, 500)), card=card)
        emulated_cards.set("dma_mib_per_s", int(random.choice([0, 50, 500])), card=card)


def case_of(random: np.random.Generator) -> Case:
    """Return any optimizer, with many tasklets or few, in rings of any number of buffers."""
    return Case(
        dtype=torch.bfloat16,
        num_devices=NUM_CARDS,
        num_buffers=int(random.integers(2, 6)),
        tasklet_bytes=int(random.choice([64, 128])) << 10,
        **OPTIMIZERS[str(random.choice([*OPTIMIZERS]))],
    )


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 1_000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_steps_of_two_cards(tmp_path: Path, emulated_cards: EmulatedCards, seeds: range) -> None:
    """A handler's steps, whole or incremental, may be waited for in parts, rolled back and redone, with failures.

    Requests come back in any order. A run may be closed in the middle of a step.
    """
    for seed in seeds:
        random = np.random.default_rng(seed)
        case, folder = case_of(random), tmp_path / str(seed)
        with (
            running(folder / "card", case, device=cards(emulated_cards.build.xclbin)) as run,
            running(folder / "host", case, device=settled_host) as host,
        ):
            for step in range(2):
                race(random, run, host, emulated_cards, step)
                same_as_host(run, host)
            run.handler.begin_step(run.collect(2))


def race(
    random: np.random.Generator, run: HandlerRun, host: HandlerRun, emulated_cards: EmulatedCards, step: int
) -> None:
    """Run one step, with cards of another speed, a failure at times, and up to two rollbacks."""
    slow_down(random, emulated_cards)
    for pipeline in pipelines(run):
        inject(pipeline, seed=int(random.integers(1 << 30)), max_delay_us=300, short_transfer_every=5)
    for card in range(NUM_CARDS):
        if random.integers(4) == 0:
            emulated_cards.inject(str(random.choice(FAULTS)), card=card, skipped=int(random.integers(3)))
    before = torch.cat(run.partition).clone()
    host.step(step)
    for _ in range(random.integers(3)):
        begin(random, run, host, step)
        run.handler.roll_back()
        assert torch.equal(torch.cat(run.partition), before)
    begin(random, run, host, step)
    run.handler.commit()


def begin(random: np.random.Generator, run: HandlerRun, host: HandlerRun, number: int) -> None:
    """Begin a step, and assert that the parameters that were waited for are those that the host has already."""
    num_parameters = len(run.case.shapes)
    plan = replace(run.collect(number), first_uses=random.permutation(num_parameters))
    if random.integers(2):
        run.handler.begin_step(plan)
    else:
        grow(random, run, plan)
    for _ in range(random.integers(4)):
        parameter = int(random.integers(num_parameters))
        run.handler.step.wait([parameter])
        assert torch.equal(run.slice(parameter), host.slice(parameter))


def grow(random: np.random.Generator, run: HandlerRun, plan: Any) -> None:
    """Begin an incremental step, whose first tasklets begin before it is known what else belongs to it."""
    run.handler.begin_incremental(everything(plan))
    complete = complete_tasklets(run, plan)
    for index in random.permutation(complete)[: random.integers(len(complete) + 1)]:
        run.handler.step.extend([int(index)])
    assert run.handler.step.complete(plan)

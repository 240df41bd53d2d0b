"""The native pipeline of a card, through real XRT, computes the host's bits and stores the host's bytes.

``test_device.py`` compares the counters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.opening import open_card
from lightning_smartinfinity.native import (
    Batch,
    CardOptions,
    CudaDevice,
    CudaStream,
    DType,
    Identity,
    Operation,
    Pipeline,
    TopK,
)
from lightning_smartinfinity.storage.extents import extent_bytes
from tests.helpers.card_runs import OPTIMIZERS, cards, pipelines, same_as_host, settled_host, setup_of
from tests.helpers.compressed import Codes, block_scaled_codes, build, compress
from tests.helpers.golden import DTYPES, STEPS, encode, flush, random_arrays
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import inject, sync_from_card, sync_to_card
from tests.helpers.runif import RunIf
from tests.hls.simulation import Buffer, Library, Simulation, aligned
from tests.hls.tasklet import GROUP, PADDING, Form, Tasklet, item_bytes, rounded_up, stored_in
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import Array, Run, StoredState
from tests.pipeline.harness import Case, complete_tasklets, everything, running
from tests.pipeline.harness import Run as HandlerRun
from tests.xrt.card_state import (
    GRADIENT,
    NUMEL,
    STEP,
    CardState,
    bound,
    card_state,
    runs_of,
    small_state,
)
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)


def update_both(state: CardState, runs_into: Any, steps: list[Any], numel: int) -> None:
    """Update on card and host, and assert equal parameters and storage; ``runs_into`` gets the parameters' memory."""
    on_card, on_host = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    assert state.update(runs_into(on_card), steps) is None
    assert state.host.work(Operation.UPDATE, runs_into(on_host), steps) is None
    np.testing.assert_array_equal(on_card, on_host)
    state.assert_same()


def test_time_of_kernels(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """It is that of the runs, without the transfers before and after them."""
    emulated_cards.set("latency_us", 20_000)
    emulated_cards.set("dma_mib_per_s", 1)
    with small_state(tmp_path, emulated_cards) as state:
        update_both(state, runs_of, [STEP], NUMEL)
        counters = state.pipeline.counters()
    assert counters.kernel_seconds >= 5 * 0.02
    assert counters.compute_seconds - counters.kernel_seconds >= 4 * NUMEL / (1 << 20)


def test_groups_meet(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """Steps and types may change within beats, with gaps and runs without parameters between them."""
    numel, random = 4_000, np.random.default_rng(7)
    steps = [STEPS["sgd_nesterov"], STEPS["sgd_first"], STEPS["sgd_dampened"]]
    gradient, *arrays = random_arrays(steps[0], numel, 6, special=False)
    borders = np.unique(random.integers(0, numel, 60))
    gradients = {dtype: encode(gradient, dtype) for dtype in DTYPES}
    plan = [
        (first, last, int(random.integers(-1, 3)), DTYPES[random.integers(3)], DTYPES[random.integers(4) % 3])
        for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
        if random.integers(5)
    ]

    def varied(parameter: Array) -> list[Run]:
        runs = []
        for index, (first, last, number, gradient_dtype, parameter_dtype) in enumerate(plan):
            memory = None if index % 6 == 5 else parameter[first:].view(np.uint8)
            values = gradients[gradient_dtype][first:]
            runs.append(Run(first, last - first, number, values, gradient_dtype, memory, parameter_dtype))
        return runs

    with card_state(tmp_path, emulated_cards, steps[0], numel, tasklet_numel=1_500) as state:
        state.write(*arrays)
        for _ in range(2):
            update_both(state, varied, steps, numel)


def test_neighbours_of_one_step_are_one_run(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    def neighbours(parameter: Array) -> list[Run]:
        return [Run(at, 5, 0, GRADIENT[at:], parameter=parameter[at:]) for at in range(0, NUMEL, 5)]

    with small_state(tmp_path, emulated_cards, tasklet_numel=0) as state:
        update_both(state, neighbours, [STEP], NUMEL)
    # To the card: the gradient and a cleared status; from it: the parameters and the status.
    assert [emulated_cards.counter(name) for name in ("runs_completed", "syncs_to", "syncs_from")] == [1, 2, 2]


@pytest.mark.parametrize("route", ["host", "storage"])
@pytest.mark.usefixtures("pyxrt")
def test_parameters_on_a_cuda_device(
    tmp_path: Path, emulated_cards: EmulatedCards, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Parameters on a CUDA device travel through slots of host memory, as those that the host updates.

    CUDA registers only other memory than the card's, and io_uring, which could register it, is not used.
    """
    parameter, expected = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
    binding, peers = bound(emulated_cards), list[range]()
    allocate = binding.allocate

    def watched(nbytes: int, p2p: bool, group: int) -> Any:
        buffer = allocate(nbytes, p2p, group)
        if p2p:
            peers.append(range(buffer.address, buffer.address + nbytes))
        return buffer

    monkeypatch.setattr(binding, "allocate", watched)
    fake_cuda.clear()
    fake_cuda.delay(1, 300)
    gradients = tmp_path / "gradients" if route == "storage" else None
    with small_state(tmp_path, emulated_cards, binding=binding, gradient_path=gradients) as state:
        on_card, on_host = ([Run(7, NUMEL - 7, 0, GRADIENT[7:], parameter=each[7:])] for each in (parameter, expected))
        tasklets = state.stored.tasklets(on_card)
        state.pipeline.submit(Batch(Operation.UPDATE, tasklets, [STEP], CudaStream(CudaDevice(0))))
        assert state.finish() is None and state.pipeline.io_engine == "threads"
        assert state.host.work(Operation.UPDATE, on_host, [STEP]) is None
        state.assert_same()
    np.testing.assert_array_equal(parameter, expected)
    assert fake_cuda.calls().count("cuMemcpyHtoDAsync_v2") == 5
    registered = [line.split()[1:] for line in fake_cuda.log() if line.startswith("cuMemHostRegister")]
    assert registered and len(peers) == 3 * (2 if route == "storage" else 1)
    for begin, nbytes in ((int(address), int(size)) for address, size in registered):
        assert all(begin + nbytes <= peer.start or peer.stop <= begin for peer in peers)


@pytest.mark.parametrize(
    ("is_sparse", "errors"),
    [(True, "1: an index is out of range or order"), (False, "32: an exponent or a code is none")],
    ids=["index", "exponent"],
)
def test_a_bad_compressed_gradient(tmp_path: Path, emulated_cards: EmulatedCards, is_sparse: bool, errors: str) -> None:
    """The kernel reports the bad gradient, and the host, which takes over, refuses it."""
    payload = compress(GRADIENT, 0.1, DType.FLOAT32) if is_sparse else block_scaled_codes(GRADIENT).payload()
    payload.indices.view(np.uint16)[3] = 0xFFFF  # or two exponents
    memory, parameter = np.frombuffer(payload.tobytes(), np.uint8).copy(), np.zeros(NUMEL, np.float32)
    runs = [Run(0, NUMEL, 0, parameter=parameter)]
    with small_state(tmp_path, emulated_cards, tasklet_numel=0) as state:
        state.stored.payloads = {0: memory}
        failure = state.update(runs, [STEP])
        assert failure is not None and failure.kind == "device"
        assert f"the kernel reports errors ({errors})" in failure.message and not parameter.any()
        failure = state.stored.work(Operation.UPDATE, runs, [STEP])
        assert failure is not None and failure.kind == "gradient"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "adamax_update"}, "there is no kernel 'adamax_update'"),
        ({"gradient_buffer_bytes": 0}, "must be at least 1"),
        ({"timeout_ms": 0}, "timeout_ms must be"),
        ({"io_engine": "io_uring"}, "a card's I/O runs in threads"),
        ({"resident_bytes": [16384]}, "no resident tasklets"),
        ({"identity": Identity(job=bytes(16), rank=0, state_format=1)}, "fp32 state only"),
        ({"files": 2}, "a card has one file"),
    ],
)
def test_pipelines_that_a_card_cannot_work(
    tmp_path: Path, emulated_cards: EmulatedCards, change: dict[str, Any], message: str
) -> None:
    """Options that make no sense are refused by name."""
    setup = setup_of(1, emulated_cards.build.xclbin)
    options: dict[str, Any] = {"kernel": "adamw_update", "gradient_buffer_bytes": 4096, "timeout_ms": 1000}
    given = {name: value for name, value in change.items() if name not in options}
    with card_state(tmp_path, emulated_cards, STEPS["adamw"], 100) as state, pytest.raises(ValueError, match=message):
        Pipeline(
            **{"identity": state.stored.identity, **given, "files": given.get("files", 1) * state.stored.files},
            num_buffers=1,
            buffer_bytes=16384,
            card=CardOptions(
                card=open_card(setup, setup.cards[0]),
                parameter_bytes=4096,
                **{name: change.get(name, value) for name, value in options.items()},
            ),
        )


def of_numel(numel: int) -> native.Tasklet:
    """Return a tasklet of so many elements that lies in no file."""
    return native.Tasklet(
        index=0,
        numel=numel,
        num_arrays=3,
        extent_bytes=extent_bytes(numel, 3),
        read_file=0,
        read_offset=0,
        read_generation=0,
        write_file=0,
        write_offset=0,
        write_generation=1,
        segments=[],
    )


def test_batches_that_a_card_cannot_work(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    step, gradient = STEPS["adamw"], np.ones(3_000, np.float32)
    with card_state(tmp_path, emulated_cards, step, 3_000, gradient_buffer_bytes=8192, parameter_bytes=8192) as state:
        half = {"gradient": encode(gradient, DType.FLOAT16), "gradient_dtype": DType.FLOAT16}
        plain, whole = Run(0, 3_000, 0, **half), Run(0, 3_000, 0, **half, parameter=gradient)
        for message, tasklets, operation, steps in (
            ("gradient does not fit", [of_numel(2**29)], Operation.UPDATE, [step]),
            ("at most 536870912 elements", [of_numel(2**29 + 1)], Operation.UPDATE, [step]),
            ("UPDATE only", state.stored.tasklets([Run(0, 3_000)]), Operation.READ, []),
            ("has no SgdStep", state.stored.tasklets([plain]), Operation.UPDATE, [step, STEPS["sgd"]]),
            ("gradient does not fit", state.stored.tasklets([Run(0, 3_000, 0, gradient)]), Operation.UPDATE, [step]),
            ("parameters do not fit", state.stored.tasklets([whole]), Operation.UPDATE, [step]),
            (
                "reads the master from storage",
                state.stored.tasklets([whole], master_in_parameter=True),
                Operation.UPDATE,
                [step],
            ),
        ):
            with pytest.raises(ValueError, match=message):
                state.pipeline.submit(Batch(operation, tasklets, steps))
        state.stored.payloads = {0: np.frombuffer(compress(gradient, 0.9, DType.FLOAT32).tobytes(), np.uint8).copy()}
        with pytest.raises(ValueError, match="payload does not fit"):
            state.update([Run(0, 3_000, 0)], [step])
        state.stored.codec = TopK(ratio=0.9)
        with pytest.raises(ValueError, match="tasklet 0: its payload does not fit gradient_buffer_bytes"):
            state.submit([Run(0, 3_000, 0, **half)], [step])


@pytest.mark.usefixtures("pyxrt")
@pytest.mark.parametrize("binding", ["native", "pyxrt"])
def test_memory_on_the_card(binding: str, emulated_cards: EmulatedCards) -> None:
    """A buffer keeps the card open, and is freed with its last user."""
    setup = setup_of(1, emulated_cards.build.xclbin, binding=binding)
    card = open_card(setup, setup.cards[0])
    group = card.group("adamw_update", 1)
    before = emulated_cards.counter("num_buffers")
    normal, direct = card.allocate(8192, group=group), card.allocate(4096, group=group, p2p=True)
    card.close()
    card.close()
    with pytest.raises(ValueError, match="it is closed"):
        card.group("adamw_update", 1)
    assert direct.nbytes == 4096 and direct.address % 4096 == 0
    sync_to_card(normal, 4096, 4096)
    sync_from_card(normal, 8192)
    counters = {"num_buffers": before + 2, "bytes_to": 4096, "bytes_from": 8192}
    assert {name: emulated_cards.counter(name) for name in counters} == counters
    with pytest.raises(ValueError, match="4096 bytes at 8192 leave its 8192"):
        sync_to_card(normal, 4096, 8192)
    del normal, direct
    assert emulated_cards.counter("num_buffers") == before


# ---- host, C simulation and card give the same bits at every step, for every optimizer and gradient


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
        return [
            case.rule.scalars(case.rule.snapshot(group), step=number, gradient_scale=0.25)
            for group in case.optimizer(groups, **case.defaults).param_groups
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
            payloads[index] = np.frombuffer(build(positions, values, numel, self.form.gradient).tobytes(), np.uint8)
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
        values = np.concatenate([region.view(np.float32) for region in state.host.regions()])
        assert 0.5 < np.isfinite(values).mean() < 1
        assert not ((values != 0) & (np.abs(values) < np.finfo(np.float32).tiny)).any()  # all were flushed
    assert emulated_cards.counter("runs_completed") == 4 * num_steps


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

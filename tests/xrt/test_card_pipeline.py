"""The native pipeline of a card, through real XRT, computes the host's bits and stores the host's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity.native import (
    Batch,
    Card,
    CardError,
    CardOptions,
    Counters,
    CudaDevice,
    CudaStream,
    DType,
    Identity,
    Operation,
    Pipeline,
    Tasklet,
)
from lightning_smartinfinity.storage.extents import extent_bytes
from tests.helpers.compressed import block_scaled_codes
from tests.helpers.golden import DTYPES, STEPS, STEPS_OF_RULES, assert_same_bits, encode, random_arrays
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import sync_from_card, sync_to_card
from tests.helpers.payload import BLOCK, compress
from tests.helpers.runif import RunIf
from tests.helpers.waiting import await_that
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import Array, Run, align
from tests.xrt.api import Buffer
from tests.xrt.card_state import BINDINGS, CardCase, CardState, card_state
from tests.xrt.cards import EmulatedCards
from tests.xrt.python_binding import ApiBinding

pytestmark = RunIf(xrt=True)

_ITEM_BYTES = {DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2}


def parameter_memory(numel: int, dtype: DType) -> Array:
    return np.zeros(numel, np.float32 if dtype is DType.FLOAT32 else np.int16)


def update_both(state: CardState, runs_of: Any, steps: list[Any], numel: int, dtype: DType = DType.FLOAT32) -> None:
    """Update on card and host, and assert equal parameters and storage; ``runs_of`` gets the parameters' memory."""
    on_card, on_host = parameter_memory(numel, dtype), parameter_memory(numel, dtype)
    failure = state.update(runs_of(on_card), steps)
    assert failure is None, failure
    assert state.host.work(Operation.UPDATE, runs_of(on_host), steps) is None
    np.testing.assert_array_equal(on_card.view(np.uint8), on_host.view(np.uint8))
    state.assert_same()


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
@pytest.mark.parametrize("name", STEPS_OF_RULES)
def test_as_on_the_host(tmp_path: Path, emulated_cards: EmulatedCards, name: str, dtype: DType, binding: str) -> None:
    """Three steps over tasklets that do not fill whole beats, with subnormals, give the host's bits."""
    numel, step = 5 * 3_001 - 7, STEPS_OF_RULES[name][0]
    gradient, *arrays = random_arrays(step, numel, 3, special=False)
    arrays[0][::7] = 1e-41
    stored_gradient = encode(gradient, dtype)

    def runs_of(parameter: Array) -> list[Run]:
        return [Run(0, numel, 0, stored_gradient, dtype, parameter, dtype)]

    with card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=3_001, binding=binding)) as state:
        state.write(*arrays)
        for _ in range(3):
            update_both(state, runs_of, [step], numel, dtype)
        assert state.pipeline.finished() == [0, 1, 2, 3, 4]
    assert emulated_cards.counter("runs_completed") == 15


@pytest.mark.parametrize("name", STEPS)
def test_special_values(tmp_path: Path, emulated_cards: EmulatedCards, name: str) -> None:
    """Infinities, NaNs and subnormals in gradient and state give the host's bits, for every variant of every rule."""
    numel, step = 3_000, STEPS[name]
    gradient, *arrays = random_arrays(step, numel, 14, special=True)
    runs = [Run(0, numel, 0, gradient)]
    with card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=1_100)) as state:
        state.write(*arrays)
        for _ in range(3):
            assert state.update(runs, [step]) is None
            assert state.host.work(Operation.UPDATE, runs, [step]) is None
        for found, expected in zip(state.stored.read(), state.host.read(), strict=True):
            assert_same_bits(found, expected)


@pytest.mark.parametrize("route", ["host", "storage"])
@pytest.mark.parametrize(
    ("name", "gradient_dtype", "parameter_dtype"),
    [
        ("adamw", DType.BFLOAT16, DType.BFLOAT16),
        ("adamw", DType.FLOAT32, DType.FLOAT16),
        ("sgd", DType.FLOAT16, DType.FLOAT32),
        ("adagrad", DType.FLOAT32, DType.FLOAT32),
    ],
)
def test_counters(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    name: str,
    gradient_dtype: DType,
    parameter_dtype: DType,
    route: str,
) -> None:
    """Counters give the exact bytes on every channel, with payload, padding and control apart."""
    numel, tasklet, step = 2 * 3_000 + 100, 3_000, STEPS[name]
    gradient, *arrays = random_arrays(step, numel, 4, special=False)
    stored_gradient = encode(gradient, gradient_dtype)

    def runs_of(parameter: Array) -> list[Run]:
        return [Run(0, numel, 0, stored_gradient, gradient_dtype, parameter, parameter_dtype)]

    through_file = route == "storage"
    with card_state(
        tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=tasklet, through_file=through_file)
    ) as state:
        state.write(*arrays)
        update_both(state, runs_of, [step], numel, parameter_dtype)
        counters = state.pipeline.counters()
        extents = sum(state.stored.extent_bytes_of(index) for index in range(3))
    sizes = [3_000, 3_000, 100]
    sent, received = _ITEM_BYTES[gradient_dtype], _ITEM_BYTES[parameter_dtype]
    state_bytes = 4 * len(arrays)
    arrays_padding = sum(len(arrays) * (align(4 * size) - 4 * size) for size in sizes)
    beats, parameter_beats = (
        sum(align_to(item * size, 64) - item * size for size in sizes) for item in (sent, received)
    )
    blocks = sum(align(sent * size) - sent * size for size in sizes)
    assert (counters.read_bytes, counters.written_bytes) == (extents, extents)
    assert counters.shared_write_bytes == sent * numel
    assert counters.shared_read_bytes == received * numel
    assert counters.internal_read_bytes == state_bytes * numel + (sent * numel if through_file else 0)
    assert counters.internal_write_bytes == state_bytes * numel
    assert counters.gradient_file_bytes == (sent * numel + blocks if through_file else 0)
    assert counters.padding_bytes == 2 * arrays_padding + parameter_beats + (2 * blocks if through_file else beats)
    assert counters.control_bytes == 3 * (2 * 4096 + 2 * 64)
    # XRT moved gradients, parameters and status beats.
    synced_gradients = 0 if through_file else sent * numel + beats
    assert emulated_cards.counter("bytes_to") == synced_gradients + 3 * 64
    assert emulated_cards.counter("bytes_from") == received * numel + parameter_beats + 3 * 64


def test_time_of_kernels(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """It is that of the runs, without the transfers before and after them."""
    step, numel, num_runs, run_seconds = STEPS["adamw"], 6_100, 3, 0.02
    emulated_cards.set("latency_us", int(run_seconds * 1e6))
    emulated_cards.set("dma_mib_per_s", 1)
    with card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=3_000)) as state:
        gradient, *arrays = random_arrays(step, numel, 0, special=False)
        state.write(*arrays)
        update_both(state, lambda parameter: [Run(0, numel, 0, gradient, DType.FLOAT32, parameter)], [step], numel)
        counters = state.pipeline.counters()
    assert counters.kernel_seconds >= num_runs * run_seconds
    assert counters.compute_seconds - counters.kernel_seconds >= 4 * numel / (1 << 20)


def align_to(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def test_a_host_counts_nothing_of_a_card(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    step = STEPS["adamw"]
    with card_state(tmp_path, emulated_cards, step, 100) as state:
        state.write(*random_arrays(step, 100, 0, special=False)[1:])
        counters: Counters = state.stored.pipeline.counters()
    assert counters.internal_write_bytes == counters.control_bytes == counters.padding_bytes == 0


@pytest.mark.parametrize("route", ["host", "storage"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name.lower())
def test_compressed_gradients(tmp_path: Path, emulated_cards: EmulatedCards, dtype: DType, route: str) -> None:
    """A payload goes to the card unchanged and alone; parts of the tasklets without a step pass through."""
    numel, tasklet, step = 70_000 + 5_000, 70_000, STEPS["adamw"]
    gradient, *arrays = random_arrays(step, numel, 5, special=False)
    payloads = {
        index: np.frombuffer(compress(part, 0.03, dtype).tobytes(), np.uint8).copy()
        for index, part in enumerate((gradient[:tasklet], gradient[tasklet:]))
    }
    nbytes = sum(payload.nbytes for payload in payloads.values())

    def runs_of(parameter: Array) -> list[Run]:
        ranges = [(10, 30_000, 0), (30_000, 30_001, -1), (40_000, 66_000, 1), (66_000, numel, 0)]
        return [
            Run(first, last - first, number, gradient_dtype=dtype, parameter=parameter[first:])
            for first, last, number in ranges
        ]

    steps = [step, STEPS["adam_near_end"]]
    with card_state(
        tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=tasklet, through_file=route == "storage")
    ) as state:
        state.write(*arrays)
        state.stored.payloads = state.host.payloads = payloads
        update_both(state, runs_of, steps, numel)
        counters = state.pipeline.counters()
    assert counters.shared_write_bytes == nbytes
    assert counters.internal_read_bytes == 12 * numel + (nbytes if route == "storage" else 0)


@pytest.mark.parametrize("route", long_but(["storage"], ["host", "storage"]))
@pytest.mark.parametrize(
    ("name", "dtype", "state_bytes", "payload_bytes"),
    [
        # Header and counts, then an index and a value for each of 8 * 655 elements: 0.06 bytes per parameter.
        ("adamw", DType.FLOAT32, 12, 2 * 64 + 10_496 + 20_992),
        ("adamw", DType.BFLOAT16, 12, 2 * 64 + 10_496 + 10_496),
        ("adagrad", DType.FLOAT16, 8, 2 * 64 + 10_496 + 10_496),
        ("sgd", DType.FLOAT32, 8, 2 * 64 + 10_496 + 20_992),
        ("rmsprop", DType.FLOAT32, 16, 2 * 64 + 10_496 + 20_992),
    ],
)
def test_counters_of_the_top_percent(
    tmp_path: Path,
    emulated_cards: EmulatedCards,
    name: str,
    dtype: DType,
    state_bytes: int,
    payload_bytes: int,
    route: str,
) -> None:
    """With one element of a hundred kept, only the payload crosses the shared channel to the card."""
    numel, step = 8 * BLOCK, STEPS[name]
    gradient, *arrays = random_arrays(step, numel, 5, special=False)
    payload = np.frombuffer(compress(gradient, 0.01, dtype).tobytes(), np.uint8)
    assert payload.nbytes == payload_bytes

    def runs_of(parameter: Array) -> list[Run]:
        return [Run(0, numel, 0, gradient_dtype=dtype, parameter=parameter, parameter_dtype=DType.BFLOAT16)]

    with card_state(tmp_path, emulated_cards, step, numel, CardCase(through_file=route == "storage")) as state:
        state.write(*arrays)
        state.stored.payloads = state.host.payloads = {0: payload}
        update_both(state, runs_of, [step], numel, DType.BFLOAT16)
        counters = state.pipeline.counters()
    assert (counters.shared_write_bytes, counters.shared_read_bytes) == (payload_bytes, 2 * numel)
    through = payload_bytes if route == "storage" else 0
    assert counters.internal_read_bytes == state_bytes * numel + through
    assert counters.internal_write_bytes == state_bytes * numel


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

    def runs_of(parameter: Array) -> list[Run]:
        runs = []
        for index, (first, last, number, gradient_dtype, parameter_dtype) in enumerate(plan):
            memory = None if index % 6 == 5 else parameter[first:].view(np.uint8)
            values = gradients[gradient_dtype][first:]
            runs.append(Run(first, last - first, number, values, gradient_dtype, memory, parameter_dtype))
        return runs

    with card_state(tmp_path, emulated_cards, steps[0], numel, CardCase(tasklet_numel=1_500)) as state:
        state.write(*arrays)
        for _ in range(2):
            update_both(state, runs_of, steps, numel)


def test_neighbours_of_one_step_are_one_run(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    step = STEPS["adamw"]
    gradient, *arrays = random_arrays(step, 1_000, 0, special=False)

    def runs_of(parameter: Array) -> list[Run]:
        return [Run(at, 10, 0, gradient[at:], parameter=parameter[at:]) for at in range(0, 1_000, 10)]

    with card_state(tmp_path, emulated_cards, step, 1_000) as state:
        state.write(*arrays)
        update_both(state, runs_of, [step], 1_000)
    assert emulated_cards.counter("runs_completed") == 1
    # To the card: the gradient and a cleared status; from it: the parameters and the status.
    assert (emulated_cards.counter("syncs_to"), emulated_cards.counter("syncs_from")) == (2, 2)


def test_parameters_on_a_cuda_device(tmp_path: Path, emulated_cards: EmulatedCards, fake_cuda: FakeCuda) -> None:
    """Parameters on a CUDA device travel through slots of host memory, as those that the host updates."""
    numel, step, stream = 5_000, STEPS["adamw"], CudaStream(CudaDevice(0))
    gradient, *arrays = random_arrays(step, numel, 12, special=False)
    parameter, expected = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
    fake_cuda.delay(1, 300)
    with card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=1_500)) as state:
        state.write(*arrays)
        fake_cuda.clear()
        tasklets = state.stored.tasklets([Run(7, numel - 7, 0, gradient[7:], parameter=parameter[7:])])
        state.pipeline.submit(Batch(Operation.UPDATE, tasklets, [step], stream))
        assert state.finish() is None
        runs = [Run(7, numel - 7, 0, gradient[7:], parameter=expected[7:])]
        assert state.host.work(Operation.UPDATE, runs, [step]) is None
        state.assert_same()
    np.testing.assert_array_equal(parameter, expected)
    assert fake_cuda.calls().count("cuMemcpyHtoDAsync_v2") == 4


class WatchedBinding(ApiBinding):
    """A binding that records where the memory lies that storage reaches."""

    def __init__(self, index: int, xclbin: Path) -> None:
        super().__init__(index, xclbin)
        self.peers: list[range] = []

    def allocate(self, nbytes: int, p2p: bool, group: int) -> Buffer:
        buffer = super().allocate(nbytes, p2p, group)
        if p2p:
            address = self.address(buffer)
            self.peers.append(range(address, address + nbytes))
        return buffer


@pytest.mark.parametrize("route", ["host", "storage"])
def test_the_cards_memory_is_registered_with_nobody(
    tmp_path: Path, emulated_cards: EmulatedCards, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """CUDA registers only other memory than the card's, and io_uring, which could register it, is not used."""
    numel, step, stream = 5_000, STEPS["adamw"], CudaStream(CudaDevice(0))
    gradient, *arrays = random_arrays(step, numel, 12, special=False)
    binding = WatchedBinding(0, emulated_cards.build.xclbin)
    monkeypatch.setitem(BINDINGS, "watched", lambda cards, index: Card(binding))
    fake_cuda.clear()
    with card_state(
        tmp_path,
        emulated_cards,
        step,
        numel,
        CardCase(tasklet_numel=1_500, binding="watched", through_file=route == "storage"),
    ) as state:
        state.write(*arrays)
        runs = [Run(0, numel, 0, gradient, parameter=np.zeros(numel, np.float32))]
        state.pipeline.submit(Batch(Operation.UPDATE, state.stored.tasklets(runs), [step], stream))
        assert state.finish() is None
        assert state.pipeline.io_engine == "threads"
    registered = [line.split()[1:] for line in fake_cuda.log() if line.startswith("cuMemHostRegister")]
    assert registered and len(binding.peers) == 3 * (2 if route == "storage" else 1)
    for begin, nbytes in ((int(address), int(size)) for address, size in registered):
        assert all(begin + nbytes <= peer.start or peer.stop <= begin for peer in binding.peers)


@pytest.mark.parametrize(
    ("is_sparse", "errors"),
    [(True, "1: an index is out of range or order"), (False, "32: an exponent or a code is none")],
    ids=["index", "exponent"],
)
def test_a_bad_compressed_gradient(tmp_path: Path, emulated_cards: EmulatedCards, is_sparse: bool, errors: str) -> None:
    """The kernel reports the bad gradient, and the host, which takes over, refuses it."""
    step, numel = STEPS["adamw"], 5_000
    gradient, *arrays = random_arrays(step, numel, 13, special=False)
    payload = compress(gradient, 0.1, DType.FLOAT32) if is_sparse else block_scaled_codes(gradient).payload()
    payload.indices.view(np.uint16)[3] = 0xFFFF  # or two exponents
    memory, parameter = np.frombuffer(payload.tobytes(), np.uint8).copy(), np.zeros(numel, np.float32)
    runs = [Run(0, numel, 0, parameter=parameter)]
    with card_state(tmp_path, emulated_cards, step, numel) as state:
        state.write(*arrays)
        state.stored.payloads = {0: memory}
        failure = state.update(runs, [step])
        assert failure is not None and failure.kind == "device"
        assert f"the kernel reports errors ({errors})" in failure.message
        assert not parameter.any()
        failure = state.stored.work(Operation.UPDATE, runs, [step])
        assert failure is not None and failure.kind == "gradient"


def test_many_tiny_tasklets(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    numel, step = 150, STEPS["adagrad_decayed"]
    gradient, *arrays = random_arrays(step, numel, 8, special=False)

    def runs_of(parameter: Array) -> list[Run]:
        return [Run(0, numel, 0, gradient, parameter=parameter)]

    with card_state(
        tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=1, num_buffers=5, compute_threads=3)
    ) as state:
        state.write(*arrays)
        for _ in range(5):
            update_both(state, runs_of, [step], numel)


def test_reads_and_gradients_travel_while_a_kernel_runs(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """While the first tasklet's kernel is held, others are read, and the next one's gradient is on the card."""
    numel, step = 3 * 2_048, STEPS["adamw"]
    gradient, *arrays = random_arrays(step, numel, 9, special=False)
    parameter = np.zeros(numel, np.float32)
    with card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=2_048)) as state:
        state.write(*arrays)
        emulated_cards.inject("hang")
        state.submit([Run(0, numel, 0, gradient, parameter=parameter)], [step])
        emulated_cards.wait_for("run-hung")
        # Two gradients and two cleared status beats; the second run waits for the first, whose kernel it needs.
        emulated_cards.wait_for("to-end", count=4)
        emulated_cards.wait_for("run-queued", count=2)
        await_that(lambda: state.pipeline.counters().read_bytes == 3 * state.stored.extent_bytes)
        assert state.pipeline.counters().written_bytes == 0
        assert not emulated_cards.events("from-begin", "run-end")
        emulated_cards.release()
        assert state.finish() is None
        assert state.host.work(Operation.UPDATE, [Run(0, numel, 0, gradient)], [step]) is None
        state.assert_same()


def test_two_cards_do_not_wait_for_each_other(tmp_path: Path, emulated_cards: EmulatedCards) -> None:
    """One card finishes its batch while the other's first kernel is held."""
    numel, step = 4 * 1_024, STEPS["sgd"]
    gradient, *arrays = random_arrays(step, numel, 10, special=False)
    runs = [Run(0, numel, 0, gradient)]
    with (
        card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=1_024, card=0)) as held,
        card_state(tmp_path, emulated_cards, step, numel, CardCase(tasklet_numel=1_024, card=1)) as free,
    ):
        for state in (held, free):
            state.write(*arrays)
        emulated_cards.inject("hang", card=0)
        held.submit(runs, [step])
        emulated_cards.wait_for("run-hung", card=0)
        assert free.update(runs, [step]) is None
        assert not emulated_cards.events("run-end", card=0)
        emulated_cards.release(0)
        assert held.finish() is None
        for state in (held, free):
            assert state.host.work(Operation.UPDATE, runs, [step]) is None
            state.assert_same()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "adamax_update"}, "there is no kernel 'adamax_update'"),
        ({"gradient_buffer_bytes": 0}, "must be at least 1"),
        ({"timeout_ms": 0}, "timeout_ms must be"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, emulated_cards: EmulatedCards, change: dict[str, Any], message: str
) -> None:
    options = {"kernel": "adamw_update", "gradient_buffer_bytes": 4096, "parameter_bytes": 4096, "timeout_ms": 1000}
    card = BINDINGS["xrt"](emulated_cards, 0)
    with card_state(tmp_path, emulated_cards, STEPS["adamw"], 100) as state, pytest.raises(ValueError, match=message):
        Pipeline(
            files=state.stored.files,
            identity=state.stored.identity,
            num_buffers=1,
            buffer_bytes=16384,
            card=CardOptions(card=card, **{**options, **change}),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"io_engine": "io_uring"}, "a card's I/O runs in threads"),
        ({"resident_bytes": [16384]}, "no resident tasklets"),
        ({"identity": Identity(job=bytes(16), rank=0, state_format=1)}, "fp32 state only"),
        ({"files": 2}, "a card has one file"),
    ],
)
def test_pipelines_that_a_card_cannot_work(
    tmp_path: Path, emulated_cards: EmulatedCards, change: dict[str, Any], message: str
) -> None:
    card = BINDINGS["xrt"](emulated_cards, 0)
    options = CardOptions(
        card=card, kernel="sgd_update", gradient_buffer_bytes=4096, parameter_bytes=4096, timeout_ms=1000
    )
    with card_state(tmp_path, emulated_cards, STEPS["sgd"], 100) as state:
        given = {"identity": state.stored.identity, **change, "files": change.get("files", 1) * state.stored.files}
        with pytest.raises(ValueError, match=message):
            Pipeline(**given, num_buffers=1, buffer_bytes=16384, card=options)


def of_numel(numel: int) -> Tasklet:
    """Return a tasklet of so many elements that lies in no file."""
    return Tasklet(
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
    with card_state(
        tmp_path, emulated_cards, step, 3_000, CardCase(gradient_buffer_bytes=8192, parameter_bytes=8192)
    ) as state:
        half = {"gradient": encode(gradient, DType.FLOAT16), "gradient_dtype": DType.FLOAT16}

        def refused(message: str, run: Run, *, master_in_parameter: bool = False, **changes: Any) -> None:
            tasklets = state.stored.tasklets([run], master_in_parameter=master_in_parameter)
            batch = Batch(changes.get("operation", Operation.UPDATE), tasklets, changes.get("steps", [step]))
            with pytest.raises(ValueError, match=message):
                state.pipeline.submit(batch)

        for numel, message in ((2**29, "gradient does not fit"), (2**29 + 1, "at most 536870912 elements")):
            with pytest.raises(ValueError, match=message):
                state.pipeline.submit(Batch(Operation.UPDATE, [of_numel(numel)], [step]))
        refused("UPDATE only", Run(0, 3_000), operation=Operation.READ, steps=[])
        refused("has no SgdStep", Run(0, 3_000, 0, **half), steps=[step, STEPS["sgd"]])
        refused("gradient does not fit", Run(0, 3_000, 0, gradient))
        refused("parameters do not fit", Run(0, 3_000, 0, **half, parameter=gradient))
        refused("reads the master from storage", Run(0, 3_000, 0, **half, parameter=gradient), master_in_parameter=True)
        state.stored.payloads = {0: np.frombuffer(compress(gradient, 0.9, DType.FLOAT32).tobytes(), np.uint8).copy()}
        with pytest.raises(ValueError, match="payload does not fit"):
            state.update([Run(0, 3_000, 0)], [step])


def test_no_such_card(emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    with pytest.raises(CardError, match=r"xrtDeviceOpen\(7\) failed"):
        Card.open(7, xclbin=str(emulated_cards.build.xclbin))
    with pytest.raises(CardError, match=r"xrtDeviceOpenByBDF\(0000:3b:00.1\) failed"):
        Card.open("0000:3b:00.1", xclbin=str(emulated_cards.build.xclbin))
    with pytest.raises(CardError, match=r"xrtDeviceLoadXclbinFile\(.*missing.xclbin\) failed"):
        Card.open(0, xclbin=str(tmp_path / "missing.xclbin"))
    with pytest.raises(CardError, match=r"XRT's library cannot be opened: .*libmissing"):
        Card.open(0, xclbin=str(emulated_cards.build.xclbin), library="libmissing.so")
    with pytest.raises(CardError, match="XRT's library has no xrtDeviceOpen"):
        Card.open(0, xclbin=str(emulated_cards.build.xclbin), library="libc.so.6")


class ScatteredBinding(ApiBinding):
    """A binding of a card whose xclbin has the arrays in two memory banks."""

    def group(self, kernel: Any, argument: int) -> int:
        return int(argument == 2)


def test_arrays_in_different_banks(
    tmp_path: Path, emulated_cards: EmulatedCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BINDINGS, "scattered", lambda cards, index: Card(ScatteredBinding(index, cards.build.xclbin)))
    with (
        pytest.raises(CardError, match="the arrays of kernel adamw_update are in different memory banks"),
        card_state(tmp_path, emulated_cards, STEPS["adamw"], 100, CardCase(binding="scattered")),
    ):
        pass


@pytest.mark.parametrize("binding", BINDINGS)
def test_memory_on_the_card(emulated_cards: EmulatedCards, binding: str) -> None:
    """A buffer keeps the card open, and is freed with its last user."""
    card = BINDINGS[binding](emulated_cards, 0)
    group = card.group("adamw_update", 1)
    before = emulated_cards.counter("num_buffers")
    normal, direct = card.allocate(8192, group=group), card.allocate(4096, group=group, p2p=True)
    card.close()
    card.close()
    with pytest.raises(ValueError, match="it is closed"):
        card.group("adamw_update", 1)
    assert emulated_cards.counter("num_buffers") == before + 2
    assert direct.nbytes == 4096 and direct.address % 4096 == 0
    sync_to_card(normal, 4096, 4096)
    sync_from_card(normal, 8192)
    assert emulated_cards.counter("bytes_to") == 4096 and emulated_cards.counter("bytes_from") == 8192
    with pytest.raises(ValueError, match="4096 bytes at 8192 leave its 8192"):
        sync_to_card(normal, 4096, 8192)
    del normal, direct
    assert emulated_cards.counter("num_buffers") == before

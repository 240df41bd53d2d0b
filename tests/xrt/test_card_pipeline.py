"""The native pipeline of a card, through real XRT, computes the host's bits and stores the host's bytes.

``test_three_ways.py`` compares every optimizer and form of gradients, ``test_device.py`` the counters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    Tasklet,
    TopK,
)
from lightning_smartinfinity.storage.extents import extent_bytes
from tests.helpers.card_runs import setup_of
from tests.helpers.compressed import block_scaled_codes, compress
from tests.helpers.golden import DTYPES, STEPS, encode, random_arrays
from tests.helpers.native_testing import sync_from_card, sync_to_card
from tests.helpers.runif import RunIf
from tests.native.fake_cuda import FakeCuda
from tests.native.stored import Array, Run
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
    counters = ("runs_completed", "syncs_to", "syncs_from")
    assert [emulated_cards.counter(name) for name in counters] == [1, 2, 2]


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


def test_memory_on_the_card(emulated_cards: EmulatedCards) -> None:
    """A buffer keeps the card open, and is freed with its last user."""
    setup = setup_of(1, emulated_cards.build.xclbin)
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

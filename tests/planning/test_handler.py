"""The handler in virtual time follows the native state machine, and moves the documented bytes in the right time."""

from __future__ import annotations

from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.devices.smartssd import device
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.gradients import compressed_gradients
from lightning_smartinfinity.planning import (
    NUM_ARRAYS,
    BlockScaledPayload,
    Channel,
    Dense,
    Device,
    Gpu,
    GradientForm,
    Host,
    Machine,
    Overlap,
    Pairs,
    System,
    TopKPayload,
    Workload,
    simulate_step,
)
from lightning_smartinfinity.planning.simulator import handler
from lightning_smartinfinity.planning.simulator.handler import (
    Route,
    SimulatedBatch,
    tasklets_of_device,
    update_on_cards,
)
from lightning_smartinfinity.planning.simulator.virtual_time import Path, Process, Resource, Simulation
from lightning_smartinfinity.planning.simulator.wiring import connect
from lightning_smartinfinity.settings import BlockScaled, TopK

MIB = 1 << 20
NUMEL = 6 * MIB  # whole tasklets of half a MiB of elements, as many on each of two devices


def machine(*, num_devices: int = 2, duplex: bool = False, channel: float = 4e9) -> Machine:
    return Machine(
        device=Device(read=2.8e9, write=1.62e9, kernel=8.2e9, sparse_kernel=6.9e9, duplex=duplex),
        num_devices=num_devices,
        channel=Channel(down=channel, up=channel, together=channel),
        gpu=Gpu(forward=2e-10, backward=7e-10, top_k=1e-10),
        host=Host(update=2e-10, receive=1e-10),
    )


def workload(gradients: GradientForm = Dense(2), **settings: int | str | None) -> Workload:  # noqa: B008
    # Tasklets hold half a MiB of elements, with Adam's state in fp32.
    return Workload(**{"numel": NUMEL, "gradients": gradients, "tasklet_bytes": 6 * MIB + 4096} | settings)  # type: ignore[arg-type]


def on_cards(simulation: Simulation, of: Workload, route: Route, **figures: float) -> SimulatedBatch:
    (lane,), host = connect(machine(**figures), 1)  # type: ignore[arg-type]
    tasklets = tasklets_of_device(of.card_layout(2), 0)
    return update_on_cards(simulation, lane, host, tasklets, workload=of, route=route, depth=64)


def test_buffers_bound_what_is_under_way() -> None:
    """With one buffer nothing overlaps, and the update takes the sum of its parts."""
    simulation, of = Simulation(), workload()
    object.__setattr__(of, "num_buffers", 1)  # a ring of the package has at least two
    on_cards(simulation, of, Route.HOST)
    numel = NUMEL // 2
    # Two devices share the channel and the host.
    parts = 12 / 2.8e9 + 12 / 1.62e9 + 16 / 8.2e9 + 2 * (2 + 2) / 4e9 + 2 * 1e-10
    assert simulation.run() == pytest.approx(numel * parts)
    # With enough buffers the SSD is always busy, except for the first tasklets' kernel and transfers.
    simulation, numel = Simulation(), 16 * NUMEL
    on_cards(simulation, workload(numel=2 * numel), Route.HOST)
    assert 1 <= simulation.run() / (numel * (12 / 2.8e9 + 12 / 1.62e9)) < 1.005


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("duplex", [False, True])
def test_one_device_stands_for_all(route: Route, duplex: bool) -> None:
    """One simulated device that stands for three ends when each of three simulated devices does."""
    of, figures = workload(Dense(4), parameter_bytes=4, numel=9 * MIB), machine(num_devices=3, duplex=duplex)
    ends = []
    for lanes in (1, 3):
        simulation = Simulation()
        connected, host = connect(figures, lanes)
        layout = of.card_layout(3)
        for number, lane in enumerate(connected):
            tasklets = tasklets_of_device(layout, number)
            update_on_cards(simulation, lane, host, tasklets, workload=of, route=route, depth=64)
        ends.append(simulation.run())
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


@pytest.mark.parametrize(("optimizer", "num_arrays"), NUM_ARRAYS.items())
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("route", Route)
def test_traffic_is_that_of_the_documents(optimizer: str, num_arrays: int, item_bytes: int, route: Route) -> None:
    """Bytes per parameter equal the table of docs/smartssd.md for every optimizer, dtype and route."""
    of = workload(Dense(item_bytes), num_arrays=num_arrays, parameter_bytes=item_bytes)
    traffic = simulate_step(machine(), of, System.CARDS, route=route).traffic
    arrays = {"adamw": 12, "adagrad": 8, "sgd": 8, "rmsprop": 16}[optimizer]
    assert (traffic.shared_down, traffic.shared_up) == (NUMEL * item_bytes, NUMEL * item_bytes)
    assert traffic.internal_read == NUMEL * (arrays + (0 if route is Route.HOST else item_bytes))
    assert traffic.internal_write == NUMEL * arrays


def test_compressed_gradients_travel_compressed() -> None:
    """TopK(0.01) sends at most 0.045 B per parameter in 16 bit and 0.065 in fp32. Other traffic stays the same."""
    for value_bytes, most in ((2, 0.045), (4, 0.065)):
        of = workload(TopKPayload(0.01, value_bytes), tasklet_bytes=12 * MIB + 4096)  # tasklets of 1M elements
        for route, down in ((Route.HOST, 0), (Route.STORAGE, 1), (Route.BACKWARD, 1)):
            traffic = simulate_step(machine(), of, System.CARDS, route=route).traffic
            sent = traffic.shared_down
            assert 0.01 * (2 + value_bytes) * NUMEL < sent <= most * NUMEL
            assert traffic.internal_read == pytest.approx(12 * NUMEL + down * sent, rel=1e-4)


@given(
    numel=st.integers(1, 1 << 22),
    ratio=st.sampled_from([0.001, 0.01, 0.05, 0.07, 0.3]),
    dtype=st.sampled_from([("bf16", 2), ("fp32", 4)]),
)
def test_payloads_are_those_of_the_codec(numel: int, ratio: float, dtype: tuple[str, int]) -> None:
    """The simulator's payload sizes equal the codec's to the byte."""
    name, value_bytes = dtype
    assert TopKPayload(ratio, value_bytes).nbytes(numel) == TopK(ratio, value_dtype=name).native().payload_bytes(numel)
    assert BlockScaledPayload().nbytes(numel) == BlockScaled().native().payload_bytes(numel)


PUBLISHED = {  # shared read, shared write, SSD to accelerator, accelerator to SSD
    (System.ZERO_INFINITY, False): (16, 16, 0, 0),
    (System.SMART_UPDATE, False): (4, 4, 16, 12),
    (System.PUBLISHED, False): (4, 4, 16, 12),
    (System.PUBLISHED, True): (4, 0.08, 12.08, 12),
}


@pytest.mark.parametrize(("system", "compressed"), PUBLISHED)
def test_published_traffic(system: System, compressed: bool) -> None:
    """Bytes per parameter equal the paper's for Adam in fp32, and the published system stores gradients in backward."""
    step = simulate_step(machine(), workload(Pairs(0.02) if compressed else Dense(4), parameter_bytes=4), system)
    traffic = step.traffic
    moved = (traffic.shared_up, traffic.shared_down, traffic.internal_read, traffic.internal_write)
    assert moved == pytest.approx([NUMEL * each for each in PUBLISHED[system, compressed]])
    if system is System.PUBLISHED and not compressed:
        assert step.backward == pytest.approx(NUMEL * 7e-10 + NUMEL / 2 * 4 / 1.62e9)


@pytest.mark.parametrize(("state_format", "parameter_bytes"), [*((name, 2) for name in STATE_FORMATS), ("fp32", 4)])
def test_the_host_moves_extents(state_format: str, parameter_bytes: int) -> None:
    """Every tasklet's extent is read and written once, except that the part held by parameters is not read."""
    of = workload(state_format=state_format, tasklet_bytes=None, parameter_bytes=parameter_bytes)
    traffic = simulate_step(machine(), of, System.HOST).traffic
    written = sum(extent.nbytes for extent in of.host_layout(2).extents.extents)
    held = 2 * NUMEL if state_format == "int8_remainder" else 4 * NUMEL if parameter_bytes == 4 else 0
    assert (traffic.shared_down, traffic.shared_up) == (written, written - held)


def test_the_host_uses_all_devices() -> None:
    """Two devices take half the seconds of one if the channel and the CPU have room."""
    of = workload(tasklet_bytes=None)
    one, two = (simulate_step(machine(num_devices=n, channel=1e12), of, System.HOST).update for n in (1, 2))
    assert one / two == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("system", "duplex"), [*product((System.CARDS, System.HOST), (False, True))])
def test_forward_hides_the_update(system: System, duplex: bool) -> None:
    """With overlap="forward" a step is shorter, but no shorter than its update allows, and moves the same bytes."""
    of = workload()
    none = simulate_step(machine(duplex=duplex), of, system)
    both = simulate_step(machine(duplex=duplex), of, system, overlap=Overlap.FORWARD)
    assert (none.step, both.traffic) == (pytest.approx(none.forward + none.backward + none.update), none.traffic)
    assert none.update + none.backward - none.update / 6 < both.step < none.step


@pytest.mark.parametrize("num_devices", [1, 10])
def test_a_duplex_ssd_reads_while_it_writes(num_devices: int) -> None:
    """Reads and writes of a duplex SSD do not wait for each other, however many requests are queued."""
    of = workload(numel=64 * NUMEL)
    update = simulate_step(machine(num_devices=num_devices, duplex=True, channel=1e12), of, System.CARDS).update
    assert update == pytest.approx(64 * NUMEL / num_devices * 12 / 1.62e9, rel=0.25)


def test_threads_are_those_of_the_device() -> None:
    """The simulated numbers of threads equal those of a card's pipeline and of the residual."""
    assert handler.CARD_COMPUTE_THREADS == device._COMPUTE_THREADS
    assert handler.MOST_FEED_BACK_THREADS == compressed_gradients._MOST_THREADS


@pytest.mark.parametrize("system", System)
def test_large_models_have_larger_tasklets(monkeypatch: pytest.MonkeyPatch, system: System) -> None:
    """The number of simulated operations is bounded for any size, and a step takes about the time of exact tasklets."""
    figures, few, many = machine(num_devices=1), 6 * 10**9, 10**12
    exact = simulate_step(figures, workload(numel=few, tasklet_bytes=None), system).step
    for module in ("workload", "systems"):
        monkeypatch.setattr(f"lightning_smartinfinity.planning.simulator.{module}.ENOUGH_TASKLETS", 50)
    for numel in (few, many):
        with mock.patch.object(Simulation, "work", autospec=True, side_effect=Simulation.work) as work:
            step = simulate_step(figures, workload(numel=numel, tasklet_bytes=None), system).step
        assert work.call_count < 50 * 8 + 40 and step / numel == pytest.approx(exact / few, rel=0.04)


def test_up_to_4096_tasklets_are_those_of_training() -> None:
    """A card's layout is simulated as it is until then; beyond, tasklets become larger."""
    for numel in (10**9, 20 * 10**9):
        of = workload(numel=numel, tasklet_bytes=None)
        assert of.simulated_card_layout(1) == of.card_layout(1)
    of = workload(numel=10**12, tasklet_bytes=None)
    assert of.simulated_card_layout(1).extents.num_tasklets in range(4096, 4105)


def ends_of(works: list[tuple[float, Path, float]]) -> list[float]:
    """Return when works end that have these beginnings, paths and units.

    A wait is work on a resource of its own.
    """
    simulation = Simulation()
    ends = [0.0] * len(works)

    def run(number: int, begin: float, path: Path, units: float) -> Process:
        yield simulation.work(Path(((Resource("wait"), 1.0),)), begin)
        yield simulation.work(path, units)
        ends[number] = simulation.now

    for number, work in enumerate(works):
        simulation.start(run(number, *work))
    simulation.run()
    return ends


def path(**seconds: float) -> Path:
    """Return a path over named resources, with seconds for each unit."""
    return Path(tuple((RESOURCES[name], each) for name, each in seconds.items()))


RESOURCES = {name: Resource(name) for name in ("disk", "reads", "writes", "channel", "slow", "own")}
RESOURCES["shared"] = Resource("shared", copies=4)
THROUGH, OTHER = path(channel=1.0, slow=4.0), path(channel=1.0)  # alone: 0.25 and 1 per second


@pytest.mark.parametrize(
    ("works", "ends"),
    [
        pytest.param([(0, path(disk=0.5), 4), (2, path(disk=0.5), 2)], [2, 3], id="one after the other"),
        pytest.param([(0, path(disk=1.0), 4), (2, path(disk=1.0), 4)], [6, 8], id="what overlaps shares evenly"),
        pytest.param([(0, path(disk=0.25), 4), (0, path(disk=1.0), 4)], [2, 5], id="a shared disk gives equal time"),
        pytest.param([(0, path(reads=0.25), 4), (0, path(writes=1.0), 4)], [1, 4], id="a duplex disk"),
        pytest.param([(0, THROUGH, 1)], [4], id="the slowest resource"),
        pytest.param([(0, THROUGH, 1.0), (0, OTHER, 3)], [4.75, 3.75], id="0.2 and 0.8 of a channel"),
        pytest.param(
            [(0, path(slow=4.0, channel=1.0), 1), (0, path(slow=4.0), 1), (0, OTHER, 7)],
            [8, 8, 8],
            id="others use what one leaves",
        ),
        pytest.param([(0, path(shared=1.0), 1)], [4], id="a copy on what is shared"),
        pytest.param([(0, path(own=1.0), 1)], [1], id="a copy on its own"),
        pytest.param([(0, path(disk=1.0), 0), (0, Path(()), 5)], [0, 0], id="nothing takes no time"),
    ],
)
def test_sums_by_hand(works: list[tuple[float, Path, float]], ends: list[float]) -> None:
    """Each work ends when it has had its units of each resource, of which all get the same part."""
    assert ends_of(works) == pytest.approx(ends)


@given(units=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), copies=st.integers(1, 4))
def test_a_busy_resource_is_never_idle(units: list[float], copies: int) -> None:
    """However many share a resource, the last ends after the total time of the work."""
    disk = Path(((Resource("disk", copies), 0.5),))
    assert max(ends_of([(0, disk, each) for each in units])) == pytest.approx(0.5 * copies * sum(units))

"""Compares the simulator with real steps on throttled devices; it predicts from rates that were measured one by one.

    python benchmarks/calibration.py --folder /mnt/nvme0 [--runs 3] [--tiny]

Real tasklets with real bytes go through the native pipeline, whose requests are slowed down: requests to each file, as
by a slow device, and requests to all files together, as by a slow channel. On the host one to four such devices share
one channel. On emulated SmartSSDs, which need XRT 2.13 and no card, each card's kernel is slow, too, and so is the
channel that the transfers of all cards share; gradients are dense or compressed. The rate of every device, channel and
kernel is measured alone, where nothing else is slow. The simulator predicts how long a step takes when all work
together: this checks scheduling, not hardware.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from comparison import write_figures
from machine import describe
from stepped_state import SteppedState

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity.devices import HostDevice
from lightning_smartinfinity.devices.smartssd import CardRing, SmartSSDDevice, kernel_of
from lightning_smartinfinity.native import DType
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.planning.simulator.gradients import Dense, GradientForm, TopKPayload
from lightning_smartinfinity.planning.simulator.hardware import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.planning.simulator.step import System, simulate_step
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings import TopK, TransferConfig
from tests.helpers.card_runs import setup_of
from tests.helpers.native_testing import Throttle
from tests.helpers.xrt import what_is_missing
from tests.xrt import api
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

FAST = 1e12  # bytes per second: no limit
DEVICE, CHANNEL = 40e6, 110e6  # bytes per second: two devices do not fill the channel, four do
TASKLET_BYTES = 256 << 10
# Rates of cards; the last two in MiB per second. A tasklet takes 61 ms to read and write and 51 ms in the kernel; those
# of four cards take 66 ms in the channel. So all of these matter, and all take far longer than the CPU.
CARD_DEVICE, CHANNEL_MIB, KERNEL_MIB = 17e6, 10, 13
CARD_TASKLET_BYTES = 512 << 10
CARD_TASKLET_NUMEL = 43008
TOP_K = TopK(0.01, error_feedback=False)


@dataclass(frozen=True)
class Row:
    """A case, measured and simulated.

    Args:
        name: Name of what was slow.
        devices: Number of devices.
        buffers: Number of buffers in the ring.
        measured: Seconds of the fastest step.
        simulated: Seconds of the simulated step.
    """

    name: str
    devices: int
    buffers: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


@contextmanager
def on_host(
    folder: Path, numel: int, *, devices: int, buffers: int, device: float, channel: float
) -> Iterator[SteppedState]:
    """Yield a state that the host updates, on files that are slowed down (0: not slowed down)."""
    made: list[HostDevice] = []

    def make(layout: PartitionLayout) -> HostDevice:
        made.append(HostDevice(num_buffers=buffers))
        return made[0]

    transfer = TransferConfig(tasklet_bytes=TASKLET_BYTES, num_buffers=buffers)
    with tempfile.TemporaryDirectory(dir=folder, prefix="calibration-") as inside:
        folders = [Path(inside) / str(number) for number in range(devices)]
        state = SteppedState(folders, [numel], state_format="fp32", transfer=transfer, make_device=make)
        try:
            throttles = [(Throttle(made[0].pipeline, [file]), device) for file in state.files]
            for throttle, rate in [*throttles, (Throttle(made[0].pipeline, state.files), channel)]:
                throttle.bytes_per_second = rate
            yield state
        finally:
            state.close()


def fastest_step(state: SteppedState, runs: int) -> dict[str, float]:
    """Measure the fastest step after one warm-up; other load on the machine can only make a throttled step slower."""
    state.step()
    return min((state.step() for _ in range(runs)), key=lambda step: step["seconds"])


def host_machine(folder: Path, numel: int, runs: int) -> Machine:
    """Measure the rates of one device alone, of the channel alone, and of the CPU."""

    def rate(**slow: float) -> float:
        with on_host(folder, numel, devices=1, buffers=4, **({"device": 0.0, "channel": 0.0} | slow)) as state:
            step = fastest_step(state, runs)
            return (step["read"] + step["written"]) / step["seconds"]

    with on_host(folder, numel, devices=1, buffers=4, device=0, channel=0) as state:
        compute = fastest_step(state, runs)["compute"] / numel
    device, channel = rate(device=DEVICE), rate(channel=CHANNEL)
    return Machine(
        device=Device(read=device, write=device, depth=1),
        num_devices=1,
        channel=Channel(down=FAST, up=FAST, together=channel),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(update=compute),
    )


def host_rows(folder: Path, numel: int, runs: int, *, tiny: bool) -> Iterator[Row]:
    """Measure and simulate devices behind a channel, with few buffers and many."""
    machine = host_machine(folder, numel, runs)
    print(
        f"measured alone: a device {machine.device.read / 1e6:.1f} MB/s, the channel"
        f" {machine.channel.together / 1e6:.1f} MB/s, the CPU {1e-6 / machine.host.update:.0f} M parameters/s"
    )
    for devices in (1, 2) if tiny else (1, 2, 4):
        for buffers in (4,) if tiny else (2, 4, 16):
            with on_host(folder, numel, devices=devices, buffers=buffers, device=DEVICE, channel=CHANNEL) as state:
                measured = fastest_step(state, runs)["seconds"]
            workload = Workload(numel=numel, gradients=Dense(2), tasklet_bytes=TASKLET_BYTES, num_buffers=buffers)
            step = simulate_step(replace(machine, num_devices=devices), workload, System.HOST)
            yield Row("host", devices, buffers, measured, step.update)


@contextmanager
def on_cards(
    folder: Path,
    numel: int,
    *,
    devices: int,
    buffers: int,
    device: float,
    slow: Callable[[], None],
    codec: TopK | None = None,
) -> Iterator[SteppedState]:
    """Yield a state that emulated cards update, each with ``numel`` parameters, on files that are slowed down.

    Args:
        folder: Folder for the files.
        numel: Parameters of each card.
        devices: Number of cards.
        buffers: Number of buffers in each ring.
        device: Bytes per second of each file.
        slow: Function that slows cards down, called when the state has been created.
        codec: Codec that compresses gradients.
    """
    made: list[SmartSSDDevice] = []

    def make(layout: PartitionLayout) -> SmartSSDDevice:
        nbytes = 2 * layout.extents.tasklet_numel
        sent = codec.native().payload_bytes(nbytes // 2, DType.BFLOAT16) if codec else nbytes
        ring = CardRing(num_buffers=buffers, gradient_buffer_bytes=sent, parameter_bytes=nbytes)
        made.append(SmartSSDDevice(setup_of(devices, build().xclbin), kernel=kernel_of("AdamW"), ring=ring))
        return made[0]

    transfer = TransferConfig(tasklet_bytes=CARD_TASKLET_BYTES, num_buffers=buffers, direct_io="on")
    with tempfile.TemporaryDirectory(dir=folder, prefix="calibration-") as inside:
        folders = [Path(inside) / str(number) for number in range(devices)]
        numels = [numel] * devices
        state = SteppedState(folders, numels, state_format="fp32", transfer=transfer, make_device=make, codec=codec)
        try:
            for file, worker in zip(state.files, made[0]._workers, strict=True):
                Throttle(worker.pipeline, [file]).bytes_per_second = device
            slow()
            yield state
        finally:
            state.close()


def upload_rate(nbytes: int, runs: int) -> float:
    """Measure the bytes per second of transfers to a card, each as large as a tasklet's gradient."""
    with api.opened(0, build().xclbin) as device:
        buffer, seconds = device.allocate(nbytes), []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.upload()
            seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds)


def slow_cards(cards: EmulatedCards, *, channel: int = 0, kernel: int = 0) -> None:
    """Set rates in MiB per second; 0 means not slowed down."""
    cards.set("channel_mib_per_s", channel)
    cards.set("kernel_mib_per_s", kernel)


def card_machine(folder: Path, cards: EmulatedCards, num_tasklets: int, runs: int) -> Machine:
    """Measure the channel, and a card's storage and kernel with dense and compressed gradients, each alone."""

    def alone(*, device: float = 0, kernel: int = 0, codec: TopK | None = None) -> float:
        """Measure seconds per parameter with two sizes, so that filling and emptying the ring does not count."""
        seconds, sizes = [], (num_tasklets // 2, num_tasklets)
        slowly = partial(slow_cards, cards, kernel=kernel)
        for size in sizes:
            numel = size * CARD_TASKLET_NUMEL
            with on_cards(folder, numel, devices=1, buffers=4, device=device, slow=slowly, codec=codec) as state:
                seconds.append(fastest_step(state, runs)["seconds"])
        return (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]) / CARD_TASKLET_NUMEL

    storage, kernel, sparse = alone(device=CARD_DEVICE), alone(kernel=KERNEL_MIB), alone(kernel=KERNEL_MIB, codec=TOP_K)
    slow_cards(cards, channel=CHANNEL_MIB)
    channel = upload_rate(2 * CARD_TASKLET_NUMEL, runs)
    print(
        f"measured alone: a card's SSD {24e-6 / storage:.1f} MB/s, the channel {channel / 1e6:.2f} MB/s, a kernel"
        f" {1e-6 / kernel:.2f} M parameters/s, with compressed gradients {1e-6 / sparse:.2f}"
    )
    return Machine(
        device=Device(read=24 / storage, write=24 / storage, kernel=16 / kernel, sparse_kernel=16 / sparse, depth=1),
        num_devices=1,
        channel=Channel(down=FAST, up=FAST, together=channel),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(),
    )


def card_rows(folder: Path, num_tasklets: int, runs: int, *, tiny: bool) -> Iterator[Row]:
    """Measure and simulate cards with slow storage, kernels and channel, with dense and with compressed gradients."""
    cards, most = EmulatedCards(build()), 1 if tiny else 4
    cards.reset(most)
    machine = card_machine(folder, cards, num_tasklets, runs)
    cases: list[tuple[str, int, TopK | None, GradientForm]] = [
        ("cards", devices, None, Dense(2)) for devices in (1, 2, 4) if devices <= most
    ]
    cases.append(("cards, top 1 %", most, TOP_K, TopKPayload(TOP_K.ratio, 2)))
    slowly = partial(slow_cards, cards, channel=CHANNEL_MIB, kernel=KERNEL_MIB)
    numel = num_tasklets * CARD_TASKLET_NUMEL
    for name, devices, codec, gradients in cases:
        for buffers in (4,) if tiny else (2, 4, 16):
            with on_cards(
                folder, numel, devices=devices, buffers=buffers, device=CARD_DEVICE, slow=slowly, codec=codec
            ) as state:
                measured = fastest_step(state, runs)["seconds"]
            workload = Workload(
                numel=numel * devices, gradients=gradients, tasklet_bytes=CARD_TASKLET_BYTES, num_buffers=buffers
            )
            step = simulate_step(replace(machine, num_devices=devices), workload, System.CARDS)
            yield Row(name, devices, buffers, measured, step.update)
    cards.reset()


def print_table(rows: Sequence[Row]) -> None:
    """Print a table in Markdown."""
    print("\n| update by | devices | buffers | measured s | simulated s | simulated is off by |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        seconds = f"{row.measured:.3f} | {row.simulated:.3f}"
        print(f"| {row.name} | {row.devices} | {row.buffers} | {seconds} | {row.error:+.1%} |")
    print(f"\nAt most {max(abs(row.error) for row in rows):.1%} off.")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where state lies meanwhile")
    parser.add_argument("--runs", type=int, default=5, help="steps of each case; the fastest counts")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    options = parser.parse_args()
    machine = describe()
    print(machine)
    runs = 1 if options.tiny else options.runs
    rows = list(host_rows(options.folder, 50_000 if options.tiny else 1_000_000, runs, tiny=options.tiny))
    if missing := what_is_missing():
        print(f"no emulated cards: {missing}")
    else:
        rows += card_rows(options.folder, 2 if options.tiny else 12, runs, tiny=options.tiny)
    print_table(rows)
    write_figures(options.json, benchmark="calibration", machine=machine, rows=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()

"""The simulator against real steps on throttled devices: what it predicts from rates that were measured one by one.

    python benchmarks/calibration.py --folder /mnt/nvme0 [--runs 3] [--tiny]

Real tasklets with real bytes go through the native pipeline, whose requests are slowed down: those to each file, as by
a slow device, and those to all files together, as by a slow channel. On the host one to four such devices lie behind
one channel. On emulated SmartSSDs, which need XRT 2.13 and no card, each card's transfers and kernel are slow, too. The
rate of every device, channel, transfer and kernel is measured alone, where nothing else is slow. What is predicted is
how long a step takes when they work together: this checks scheduling, not hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from machine import describe
from stepped_state import SteppedState

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity.config import TransferConfig
from lightning_smartinfinity.devices import HostDevice
from lightning_smartinfinity.devices.smartssd import CardRing, SmartSSDDevice, kernel_of
from lightning_smartinfinity.native.testing import Throttle
from lightning_smartinfinity.plan.gradients import Dense
from lightning_smartinfinity.plan.machine import Channel, Device, Gpu, Host, Machine
from lightning_smartinfinity.plan.step import System, simulate_step
from lightning_smartinfinity.plan.workload import Workload
from lightning_smartinfinity.transfer.layout import PartitionLayout
from tests.helpers.card_runs import plan_of
from tests.helpers.xrt import what_is_missing
from tests.xrt import api
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

FAST = 1e12  # bytes per second: no bound
DEVICE, CHANNEL = 40e6, 110e6  # bytes per second: two devices do not fill the channel, four do
TASKLET_BYTES = 256 << 10
# Of cards; the last two in MiB per second. A tasklet takes 30 ms to read or write, 41 to send or receive its elements,
# 51 in the kernel: far more than this machine's CPU, and apart, since chance decides what ends first of two alike.
CARD_DEVICE, TRANSFER_MIB, KERNEL_MIB = 17e6, 2, 13
CARD_TASKLET_BYTES = 512 << 10
CARD_TASKLET_NUMEL = 43008


@dataclass(frozen=True)
class Row:
    """One case.

    Args:
        name: What was slow.
        devices: How many.
        buffers: Of the ring.
        measured: Seconds of the fastest step.
        simulated: The same.
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
    """A state whose update the host computes, on files that are slowed down (0: as fast as they are)."""
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
    """After one that does not count: whatever else runs on the machine only makes a throttled step slower."""
    state.step()
    return min((state.step() for _ in range(runs)), key=lambda step: step["seconds"])


def host_machine(folder: Path, numel: int, runs: int) -> Machine:
    """Rates of one device alone, of the channel alone, and of the CPU."""

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
    """Devices behind a channel, with few buffers and many."""
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
    folder: Path, numel: int, *, devices: int, buffers: int, device: float, slow: Callable[[], None]
) -> Iterator[SteppedState]:
    """A state whose update emulated cards compute, each with as many parameters, on files that are slowed down.

    Args:
        folder: Where it lies meanwhile.
        numel: Parameters of each card.
        devices: Cards.
        buffers: Of each ring.
        device: Bytes per second of each file.
        slow: Slows cards down, once the state is there.
    """
    made: list[SmartSSDDevice] = []

    def make(layout: PartitionLayout) -> SmartSSDDevice:
        nbytes = 2 * layout.extents.tasklet_numel
        ring = CardRing(num_buffers=buffers, gradient_bytes=nbytes, parameter_bytes=nbytes)
        made.append(SmartSSDDevice(plan_of(devices, build().xclbin), kernel=kernel_of("AdamW"), ring=ring))
        return made[0]

    transfer = TransferConfig(tasklet_bytes=CARD_TASKLET_BYTES, num_buffers=buffers, direct_io="on")
    with tempfile.TemporaryDirectory(dir=folder, prefix="calibration-") as inside:
        folders = [Path(inside) / str(number) for number in range(devices)]
        state = SteppedState(folders, [numel] * devices, state_format="fp32", transfer=transfer, make_device=make)
        try:
            for file, worker in zip(state.files, made[0]._workers, strict=True):
                Throttle(worker.pipeline, [file]).bytes_per_second = device
            slow()
            yield state
        finally:
            state.close()


def upload_rate(nbytes: int, runs: int) -> float:
    """Bytes per second of transfers to a card, each as large as a tasklet's gradient."""
    with api.opened(0, build().xclbin) as device:
        buffer, seconds = device.allocate(nbytes), []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.upload()
            seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds)


def card_rows(folder: Path, num_tasklets: int, runs: int, *, tiny: bool) -> Iterator[Row]:
    """Cards with slow storage, transfers and kernels, each of which takes about as long as the others."""
    cards, numel = EmulatedCards(build()), num_tasklets * CARD_TASKLET_NUMEL
    cards.reset(4)

    def slow(transfers: int, kernel: int) -> None:
        cards.set("dma_mib_per_s", transfers)
        cards.set("kernel_mib_per_s", kernel)

    def alone(device: float, transfers: int, kernel: int) -> float:
        """Seconds per parameter of one card: of two sizes, so that filling and emptying the ring does not count."""
        seconds = []
        for size in (num_tasklets // 2 * CARD_TASKLET_NUMEL, numel):
            slowly = partial(slow, transfers, kernel)
            with on_cards(folder, size, devices=1, buffers=4, device=device, slow=slowly) as state:
                seconds.append(fastest_step(state, runs)["seconds"])
        return (seconds[1] - seconds[0]) / (num_tasklets - num_tasklets // 2) / CARD_TASKLET_NUMEL

    storage, kernel = alone(CARD_DEVICE, 0, 0), alone(0, 0, KERNEL_MIB)
    slow(TRANSFER_MIB, 0)
    transfers = upload_rate(2 * CARD_TASKLET_NUMEL, runs)
    machine = Machine(
        device=Device(read=24 / storage, write=24 / storage, kernel=16 / kernel, depth=1),
        num_devices=1,
        channel=Channel(down=transfers, up=transfers),
        gpu=Gpu(forward=0.0, backward=0.0),
        host=Host(),
    )
    print(
        f"measured alone: a card's SSD {machine.device.read / 1e6:.1f} MB/s, its transfers"
        f" {machine.channel.up / 1e6:.2f} MB/s in each direction, its kernel {1e-6 / kernel:.2f} M parameters/s"
    )
    for devices in (1,) if tiny else (1, 2, 4):
        for buffers in (4,) if tiny else (2, 4, 16):
            slowly = partial(slow, TRANSFER_MIB, KERNEL_MIB)
            with on_cards(folder, numel, devices=devices, buffers=buffers, device=CARD_DEVICE, slow=slowly) as state:
                measured = fastest_step(state, runs)["seconds"]
            workload = Workload(numel=numel, gradients=Dense(2), tasklet_bytes=CARD_TASKLET_BYTES, num_buffers=buffers)
            yield Row("cards", devices, buffers, measured, simulate_step(machine, workload, System.CARDS).update)
    cards.reset()


def print_table(rows: Sequence[Row]) -> None:
    """In Markdown."""
    print("\n| update by | devices | buffers | measured s | simulated s | simulated is off by |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        seconds = f"{row.measured:.3f} | {row.simulated:.3f}"
        print(f"| {row.name} | {row.devices} | {row.buffers} | {seconds} | {row.error:+.1%} |")
    print(f"\nAt most {max(abs(row.error) for row in rows):.1%} off.")


def main() -> None:
    """Prints the table."""
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
    if options.json:
        figures = {"benchmark": "calibration", "machine": machine, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

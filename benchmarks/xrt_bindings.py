"""Measures the cost of the interpreter's lock in the two bindings of XRT, on emulated SmartSSDs only.

Genuine XRT 2.13 and its pyxrt (or the tests' build of it) work cards that a driver of this project emulates. Transfers
and kernels take the time that ``--dma-mib`` and ``--kernel-mib`` say, and sleep for most of it. That is far slower than
a card, so that this machine's disk and cores do not limit the results. Ratios matter, not seconds:

- Two uploads at once, one per card, each from a Python thread: the ratio is 1 if calls overlap, 2 if they take turns.
- A step of the optimizer on two cards, each with as many parameters as the one card had: the same ratio.
- The progress of a Python loop beside a step on two cards, relative to its progress alone: what is left for training.

Usage::

    python benchmarks/xrt_bindings.py [--million 4] [--dma-mib 60] [--kernel-mib 1000] [--folder .] [--runs 5] [--tiny]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from comparison import write_figures
from machine import describe
from stepped_state import SteppedState

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_smartinfinity import TransferConfig
from lightning_smartinfinity.devices.smartssd import CardRing, SmartSSDDevice, kernel_of
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from tests.helpers.card_runs import setup_of
from tests.helpers.xrt import VERSION, what_is_missing
from tests.xrt import api, pyxrt
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

BINDINGS = ("native", "pyxrt")
UPLOADS = 2  # per card and run


@dataclass(frozen=True)
class Figures:
    """Figures of one binding; medians over the runs."""

    binding: str
    upload_seconds: float
    upload_ratio: float
    step_seconds: float
    step_ratio: float
    python_left: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", type=float, default=4, help="parameters per card")
    parser.add_argument("--dma-mib", type=int, default=60, help="per second, to and from each card")
    parser.add_argument("--kernel-mib", type=int, default=1000, help="per second, of each kernel's memory")
    parser.add_argument("--folder", type=Path, default=Path(), help="where state is made, and removed again")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tiny", action="store_true", help="shows no more than that it works")
    arguments = parser.parse_args()
    if missing := what_is_missing():
        parser.error(f"emulates SmartSSDs under XRT; {missing}")
    numel = 1 << 18 if arguments.tiny else int(arguments.million * 1e6)
    cards = EmulatedCards(build())
    cards.reset()
    cards.set("dma_mib_per_s", arguments.dma_mib)
    cards.set("kernel_mib_per_s", arguments.kernel_mib)
    sys.modules["pyxrt"] = pyxrt.load()
    machine = describe()
    print(machine)
    speeds = f"{arguments.dma_mib} MiB/s to and from the host, {arguments.kernel_mib} MiB/s in kernels"
    print(f"XRT {VERSION}, emulated SmartSSDs: {speeds}; {numel / 1e6:g} million parameters per card")
    figures = [measure(binding, cards, numel, arguments) for binding in BINDINGS]
    print_table(figures)
    write_figures(arguments.json, machine=machine, numel=numel, bindings=[asdict(row) for row in figures])


def measure(binding: str, cards: EmulatedCards, numel: int, arguments: argparse.Namespace) -> Figures:
    """Measure uploads and steps through one binding."""
    runs = 1 if arguments.tiny else arguments.runs
    uploads = uploaders(binding, cards.build.xclbin, nbytes=4 * numel)
    one_upload, two_uploads = (median_of(runs, partial(side_by_side, uploads[:number])) for number in (1, 2))
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="xrt-bindings-") as folder:
        steps, python_left = [], 0.0
        for number in (1, 2):
            state = stepped(binding, cards.build.xclbin, Path(folder) / str(number), numel, number)
            state.step()
            steps.append(median_of(runs, state.step))
            python_left = statistics.median(python_beside(state.step) for _ in range(runs))
            state.close()
    return Figures(binding, one_upload, two_uploads / one_upload, steps[0], steps[1] / steps[0], python_left)


def uploaders(binding: str, xclbin: Path, *, nbytes: int) -> list[Callable[[], None]]:
    """Return, for each of two cards, a function that copies a buffer to the card several times."""
    return [(_c_uploader if binding == "native" else _pyxrt_uploader)(number, xclbin, nbytes) for number in range(2)]


def _c_uploader(number: int, xclbin: Path, nbytes: int) -> Callable[[], None]:
    """Return an uploader that calls XRT's C library without the lock, as the native binding does."""
    buffer = api.Device(number, xclbin).allocate(nbytes)

    def upload() -> None:
        for _ in range(UPLOADS):
            buffer.upload()

    return upload


def _pyxrt_uploader(number: int, xclbin: Path, nbytes: int) -> Callable[[], None]:
    module: ModuleType = pyxrt.load()
    device = module.device(number)
    device.load_xclbin(str(xclbin))
    buffer = module.bo(device, nbytes, module.bo.normal, 0)
    direction = module.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE

    def upload(_device: object = device) -> None:  # holds the device, which a buffer alone does not keep open
        for _ in range(UPLOADS):
            buffer.sync(direction, nbytes, 0)

    return upload


def side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Run each work in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stepped(binding: str, xclbin: Path, folder: Path, numel: int, num_cards: int) -> SteppedState:
    """Create a state of ``numel`` parameters per card."""
    transfer = TransferConfig(tasklet_bytes=max(1 << 20, min(16 << 20, numel)), direct_io="on")

    def device(layout: PartitionLayout) -> SmartSSDDevice:
        nbytes = 2 * layout.extents.tasklet_numel  # bytes of bf16 parameters
        ring = CardRing(num_buffers=16, gradient_buffer_bytes=nbytes, parameter_bytes=nbytes)
        return SmartSSDDevice(setup_of(num_cards, xclbin, binding=binding), kernel=kernel_of("AdamW"), ring=ring)

    folders = [folder / f"card{number}" for number in range(num_cards)]
    return SteppedState(folders, [numel] * num_cards, state_format="fp32", transfer=transfer, make_device=device)


def python_beside(work: Callable[[], object]) -> float:
    """Return a loop's turns per second while ``work`` is in progress, relative to those alone."""
    thread = threading.Thread(target=work)
    thread.start()
    beside = turns_per_second(thread.is_alive)
    thread.join()
    end = time.perf_counter() + 0.1
    return beside / turns_per_second(lambda: time.perf_counter() < end)


def turns_per_second(while_true: Callable[[], bool]) -> float:
    start, turns = time.perf_counter(), 0
    while while_true():
        turns += 1
        sum(range(1000))
    return turns / (time.perf_counter() - start)


def median_of(runs: int, work: Callable[[], object]) -> float:
    """Return the median seconds of the work."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def print_table(figures: Sequence[Figures]) -> None:
    print("| binding | upload, one card | two / one | step, one card | two / one | Python beside a step |")
    print("|---|---|---|---|---|---|")
    for row in figures:
        print(
            f"| {row.binding} | {row.upload_seconds:.3f} s | {row.upload_ratio:.2f} | {row.step_seconds:.3f} s |"
            f" {row.step_ratio:.2f} | {row.python_left:.0%} |"
        )


if __name__ == "__main__":
    main()

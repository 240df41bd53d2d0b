"""Where a machine has several NUMA nodes, the threads of a drive run on the drive's node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lightning_smartinfinity.native import StateFile, TensorStore
from tests.helpers.native_testing import use_system_folder
from tests.native.stored import StoredState
from tests.native.test_pipeline import NUMEL, assert_same, initial

CPUS = sorted(os.sched_getaffinity(0))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Path]:
    """A folder like /sys, with two nodes, of which node 1 has the last CPU."""
    for name, text in {"online": "0-1", "node0/cpulist": f"0-{CPUS[-1] - 1}", "node1/cpulist": str(CPUS[-1])}.items():
        write(tmp_path / "sys/devices/system/node" / name, text)
    use_system_folder(str(tmp_path / "sys"))
    yield tmp_path / "sys"
    use_system_folder(None)


def add_device(system: Path, folder: Path, nodes: Sequence[int]) -> None:
    """Let a partition of a drive at a node hold a folder, or a RAID of several drives."""
    device = system / "devices/virtual/block/md0"
    (device / "slaves").mkdir(parents=True)
    for number, node in enumerate(nodes):
        drive = system / f"devices/pci{number}/nvme/nvme0n1/nvme0n1p1"
        drive.mkdir(parents=True)
        write(system / f"devices/pci{number}/numa_node", str(node))
        (device / "slaves" / str(number)).symlink_to(drive)
        device = device if len(nodes) > 1 else drive
    number = folder.stat().st_dev
    link = system / f"dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)


def affinities(others: set[str]) -> dict[str, set[int]]:
    """Return the CPUs on which threads may run, by the threads' names, without other threads."""
    tasks = [Path("/proc/self/task", task) for task in set(os.listdir("/proc/self/task")) - others]
    return {(task / "comm").read_text().strip(): os.sched_getaffinity(int(task.name)) for task in tasks}


@pytest.mark.parametrize(
    ("engine", "names"), [("io_uring", {"smart-inf-ring", "smart-inf-crc"}), ("threads", {"smart-inf-io"})]
)
@pytest.mark.parametrize(
    ("nodes", "changed", "cpus"),
    [
        pytest.param([1], {}, CPUS[-1:], id="a drive"),
        pytest.param([1, 1], {}, CPUS[-1:], id="a RAID of one node"),
        pytest.param([0, 1], {}, CPUS, id="a RAID of two nodes"),
        pytest.param([-1], {}, CPUS, id="a drive of an unknown node"),
        pytest.param([1], {"online": "0"}, CPUS, id="one node"),
        pytest.param([1], {"node1/cpulist": "1000-1023,5000"}, CPUS, id="CPUs that this process does not have"),
        pytest.param([], {}, CPUS, id="no folder of the system"),
    ],
)
def test_threads_run_on_the_node_of_their_drive(
    tmp_path: Path,
    system: Path,
    engine: str,
    names: set[str],
    nodes: list[int],
    changed: dict[str, str],
    cpus: list[int],
) -> None:
    """The threads of state and of tensors do, if the node is known and is not the only one. The caller does not."""
    add_device(system, tmp_path, nodes or [1])
    for name, text in changed.items():
        write(system / "devices/system/node" / name, text)
    if not nodes:
        shutil.rmtree(system)
    others = set(os.listdir("/proc/self/task"))
    with StoredState(tmp_path, NUMEL, 2048, options={"io_engine": engine}) as state:
        store = TensorStore([StateFile(str(path), direct=False) for path in state.paths], io_engine=engine)
        assert affinities(others) == {name: set(cpus) for name in {"smart-inf-cpu", *names}}
        assert os.sched_getaffinity(0) == set(CPUS)
        state.write(*initial())
        assert_same(state.read(), initial())
        store.close()

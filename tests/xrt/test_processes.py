"""Cards in processes of their own: ranks that share them, trainings that are killed, and the end of a process."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from hls.description import SMARTSSD
from hls.xclbin import xclbin
from lightning_smartinfinity import SmartInfinityError, SmartSSDConfig, TransferConfig
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.helpers.assertions import differing
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.runif import RunIf
from tests.helpers.waiting import BUILD_TEST_LIMIT, PROCESS_LIMIT
from tests.native.builds import ROOT
from tests.training import worker
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of
from tests.xrt.builds import EmulatorBuild, build
from tests.xrt.cards import EmulatedCards

pytestmark = RunIf(xrt=True)

FIRST_MASTER = 1
"""Index of the pointer of ``sgd_update`` to the master weights."""
CARD_MIB = 4
# 4096 elements of state, of gradients in fp32, as micro-batches are accumulated, and of parameters in 16 bit, each in
# whole blocks of 4 KiB; and a block for the status.
BUFFER_BYTES = (48 + 16 + 8 + 4) * 1024


def choose(folder: Path) -> list[list[str | int]]:
    """Choose, for "smartssd" and for "auto", first while rank 1's card computes wrongly, then while nothing is wrong.

    Each outcome is who updates and how many processes share a card, or the error; then how many runs this rank's card
    had.
    """
    cards, outcomes = EmulatedCards(build()), []
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for wanted, failing in (("smartssd", True), ("smartssd", False), ("auto", True), ("auto", False)):
        cards.reset()
        if failing and rank == 1:
            cards.inject("corrupt", card=rank, skipped=1, pointer=FIRST_MASTER, bit=64 * 32)
        settings = OffloadSettings(
            storage=(folder / f"disk{rank}",),
            transfer=TransferConfig(num_buffers=2),
            update_device=wanted,
            smartssd=SmartSSDConfig(xclbin=cards.build.xclbin, devices=[rank]),
        )
        try:
            plan = choose_update_device(settings, optimizer="SGD").cards
            found: list[str | int] = ["host"] if plan is None else [plan.cards[0].address, plan.sharers]
        except SmartInfinityError as error:
            found = [f"{type(error).__name__}: {error}"]
        outcomes.append([*found, cards.counter("runs_completed", rank)])
    dist.destroy_process_group()
    return outcomes


def test_a_card_of_one_rank_fails_its_self_test(tmp_path: Path, emulated_cards_of_process: EmulatedCards) -> None:
    """If one rank's card fails, both raise or both update on their hosts; otherwise each has all of its own card."""
    for rank, (raised, chosen, left, taken) in enumerate(on_ranks(choose, tmp_path)):
        assert raised[0].startswith("DeviceError: sgd_update of the emulated card 1 computes other bits than the host")
        assert left[0] == "host" and chosen == taken == [str(rank), 1, 9]


def train(folder: Path) -> dict[str, Any]:
    """Train on the host and then on two small cards, which both ranks use; return losses, masters and memory in use."""
    cards, card_bytes = EmulatedCards(build()), list[int]()
    cards.reset()
    recipe = Recipe(
        groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2, precision="bf16-mixed"
    )
    found: dict[str, Any] = {"card_bytes": card_bytes}
    for device in ("host", "smartssd"):
        run = worker.Run(
            out=str(folder / device),
            recipe=recipe,
            devices=2,
            storage=[str(folder / device / "a"), str(folder / device / "b")],
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 30},
            options={
                "update_device": device,
                "smartssd": SmartSSDConfig(xclbin=folder / "small.xclbin") if device == "smartssd" else None,
            },
        )
        card_bytes.clear()
        look = LambdaCallback(
            on_train_end=lambda *_: card_bytes.extend(cards.counter("card_bytes", card) for card in range(2))
        )
        module, _, recorder = worker.train(run, look)
        found[device] = module.losses, recorder.masters
    return found


@pytest.mark.usefixtures("emulated_cards_of_process")
def test_two_processes_share_a_card(tmp_path: Path) -> None:
    """Each process takes half of the memory of both cards, and no more; the result is the host's."""
    bank = dataclasses.replace(SMARTSSD.platform.bank, size_bytes=CARD_MIB << 20)
    small = dataclasses.replace(SMARTSSD, platform=dataclasses.replace(SMARTSSD.platform, bank=bank))
    (tmp_path / "small.xclbin").write_bytes(xclbin(small))
    share = (CARD_MIB << 20) * 7 // 8 // 2
    for found in on_ranks(train, tmp_path):
        (losses, masters), (expected_losses, expected) = found["smartssd"], found["host"]
        assert losses == expected_losses and masters
        assert differing(masters, expected) == []
        assert found["card_bytes"] == 2 * [share // BUFFER_BYTES * BUFFER_BYTES]


# ---- a training that is killed in a step or a save, and resumed, ends as if it had never stopped


SAVE_EVERY, NUM_STEPS = 4, 32


def fit(folder: Path, *, cards: bool = True, overlap: str = "forward", **settings: Any) -> int:
    """Train from the last checkpoint, if there is one, and return the exit status."""
    last = folder / "last.ckpt"
    run = StorageRun(
        out=str(folder),
        storage=[str(folder / "ssd0"), str(folder / "ssd1")],
        cards=cards,
        checkpoint=str(last) if last.exists() else "",
        epochs=NUM_STEPS,
        trainer={"limit_val_batches": 0, "max_steps": NUM_STEPS},
        options={"overlap": overlap},
        # An epoch is what lies between two saves, since Lightning begins a resumed epoch with its first batch.
        module={"width": 128, "length": 2 * SAVE_EVERY, "noise": False, "shuffle": False, "dropout": 0.0},
        **{"save_every": SAVE_EVERY, "transfer": {"keep": False}, **settings},
    )
    code, output = launch(run)
    assert code in (0, -signal.SIGKILL), output[-4000:]
    return code


def assert_same(folder: Path, straight: Path) -> None:
    """Assert equal losses and learning rates of all steps, and equal final state."""
    assert len(steps_of(folder)) == NUM_STEPS and steps_of(folder) == steps_of(straight)
    assert end_of(folder)["state"] == end_of(straight)["state"]


def left_in(folder: Path) -> list[Path]:
    """Return the files of state."""
    return [path for name in ("ssd0", "ssd1") for path in (folder / name).rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, emulated_cards_of_process: Any) -> Path:
    """The folder of a training on the host without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    assert fit(folder, cards=False, overlap="none") == 0
    return folder


def test_killed_in_a_step_and_in_a_save(tmp_path: Path, straight: Path) -> None:
    """A training that is killed late, in a save and then in a step, ends as on the host and leaves no state."""
    for moment, step, seconds in (("save", 20, 0.004), ("step", 30, 0.002)):
        kill = {"kill_at": f"kill at {moment}", "kill_step": step, "kill_after": seconds}
        assert fit(tmp_path, **kill) == -signal.SIGKILL
        assert left_in(tmp_path), "it was not killed while its state was on storage"
    assert fit(tmp_path) == 0
    assert_same(tmp_path, straight)
    assert not left_in(tmp_path)


def test_killed_on_the_host_and_resumed_from_storage_on_cards(tmp_path: Path, straight: Path) -> None:
    """Cards go on with the tasklets that the host has left, also where the settings name another size."""
    kept: dict[str, Any] = {"save_every": 0, "transfer": {"keep": "on-failure"}}
    assert fit(tmp_path, cards=False, kill_at="kill at batch end", kill_step=20, **kept) == -signal.SIGKILL
    kept["transfer"]["tasklet_bytes"] = 128 * 1024
    assert fit(tmp_path, resume=True, **kept) == 0
    assert_same(tmp_path, straight)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_moments(tmp_path: Path, straight: Path, seed: int) -> None:
    """A training that is killed up to three times, on lines that only the clock chooses, ends as on the host."""
    choose = random.Random(seed)
    overlap = choose.choice(("none", "forward", "backward"))
    for _ in range(choose.randint(1, 3)):
        moment, step = choose.choice(("step", "save")), choose.randrange(SAVE_EVERY, NUM_STEPS, SAVE_EVERY)
        step += choose.randrange(1, SAVE_EVERY) if moment == "step" else 0
        kill = {"kill_at": f"kill at {moment}", "kill_step": step, "kill_after": choose.uniform(0.001, 0.05)}
        if fit(tmp_path, overlap=overlap, **kill) == 0:
            break
    else:
        assert fit(tmp_path, overlap=overlap) == 0
    assert_same(tmp_path, straight)


# ---- the end of a process, and sanitizers


@pytest.mark.timeout(BUILD_TEST_LIMIT)
@pytest.mark.parametrize(("fault", "times"), long_but([("hang", 1)], [("hang", 1), ("hang", 10), ("stall", 1)]))
def test_process_ends_with_what_was_given_up(
    emulated_cards: EmulatedCards, tmp_path: Path, fault: str, times: int
) -> None:
    """A process exits before XRT's static destructors, which would abort it, and its output is not lost."""
    arguments = [str(emulated_cards.build.xclbin), str(tmp_path), fault]
    for _ in range(times):  # without the precaution about half of the runs fail
        completed = _run([sys.executable, "-m", "tests.xrt.hung_exit", *arguments], emulated_cards.build, {})
        assert (completed.returncode, completed.stdout) == (0, "left hanging\n"), completed.stderr


@pytest.mark.long
@pytest.mark.timeout(BUILD_TEST_LIMIT)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_stress(sanitizers: str) -> None:
    """Sanitizers find no bad access, leak, undefined behaviour or race in the driver; cards differ in address."""
    made = build(sanitizers)
    command, settings = [str(made.stress), str(made.probe_xclbin), "50"], {"SMART_INFINITY_CARD_COUNT": "2"}
    completed = _run(command, made, settings)
    if "unexpected memory mapping" in completed.stderr:
        # Older thread sanitizers know fewer layouts of the address space than kernels choose from.
        completed = _run(["setarch", "-R", *command], made, settings)
    assert completed.returncode == 0, completed.stderr
    shell = "xilinx_u2_gen3x4_xdma_gc_base_2"
    assert sorted(completed.stdout.splitlines()) == sorted([f"{shell} 0000:10:00.1", f"{shell} 0000:11:00.1"] * 2)


def _run(command: list[str], made: EmulatorBuild, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | made.environment | {"PYTHONPATH": str(ROOT)} | settings
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT)

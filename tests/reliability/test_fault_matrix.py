"""Whatever a disk does, a training raises our error or ends with the same bits: fault, file, engine, overlap."""

from __future__ import annotations

import functools
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.native import io_engines
from lightning_smartinfinity.store import StateStore
from lightning_smartinfinity.store.folders import COMMIT_NAME
from lightning_smartinfinity.transfer.windows import Window
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit, lose_block, misplace_block
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold, inject
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, lenient
from tests.store.makers import commit_generation, create
from tests.training.worker import Run, train

RECIPE = Recipe(precision="bf16-mixed", width=64, depth=1)
STEPS = 4
ENGINES = [name for name, unavailable in io_engines() if not unavailable]
OVERLAPS = ["none", "forward", "backward"]
PARAMETERS_ON_STORAGE: dict[str, Any] = {
    "offload_param": {"device": "nvme"},
    "stage3_param_persistence_threshold": 0,
}
OUTCOME = "our error, or the same bits"


@dataclass(frozen=True)
class Fault:
    """What the disk does to the state of a training, from its second step on.

    Args:
        name: What it is called in the table.
        injected: Arguments of ``inject``, without the number of the request.
        at: Name of the argument that takes this number.
        held: Argument of ``Hold`` that takes it: the request is never answered.
        harmless: Whether the training ends with the same bits, and nothing is raised.
    """

    name: str
    injected: dict[str, int] = field(default_factory=dict)
    at: str | None = None
    held: str | None = None
    harmless: bool = False


FAULTS = {
    "flip": Fault("bit flip in what is read", at="flip_read_at"),
    "block": Fault("read that returns another block", at="misread_at"),
    "extent": Fault("read that returns another block", {"misread_by": 1 << 16}, at="misread_at"),
    "lost": Fault("write that is reported done and lost", at="lose_write_at"),
    "read error": Fault("read or write that fails", at="fail_read_at"),
    "torn write": Fault("read or write that fails", at="fail_write_at"),
    "slow": Fault("slow, late and short transfers", {"delay_us": 2000, "max_delay_us": 3000}, harmless=True),
    "short": Fault("slow, late and short transfers", {"short_transfer_every": 3, "max_delay_us": 500}, harmless=True),
    "hung read": Fault("read or write that is never answered", held="read_at"),
    "hung write": Fault("read or write that is never answered", held="write_at"),
}

Arrays = list[NDArray[np.float32]]


class Faulty(pl.Callback):
    """Lets a disk do its worst from the second step on, and reads the whole state at the end.

    Args:
        fault: What it does; ``None``: it works.
        number: Number of the read or write that it does it to.
        file: What it holds: ``state`` or ``parameters``.
        opened: Ends what holds requests.
    """

    def __init__(self, fault: Fault | None, number: int, file: str, opened: ExitStack) -> None:
        self._fault = fault
        self._file = file
        self._number = number
        self._opened = opened
        self.state: Arrays = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        fault = self._fault
        if trainer.global_step != 1 or fault is None:
            return
        strategy: Any = trainer.strategy
        worker = strategy._parameters.store.core if self._file == "parameters" else _handler(trainer)._device.pipeline
        if fault.held is not None:
            hold: Any = Hold(worker, **{fault.held: self._number})  # type: ignore[call-overload]
            self._opened.callback(hold.release)
        else:
            at = {} if fault.at is None else {fault.at: self._number}
            inject(worker, seed=self._number, **fault.injected, **at)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def keep(window: Window) -> None:
            self.state += [array.copy() for array in window.arrays]

        _handler(trainer).state.scan(keep)


def _handler(trainer: pl.Trainer) -> Any:
    return trainer.strategy.optimizers[0].update.drained_handler()  # type: ignore[attr-defined]


def trained(
    folder: Path, *, fault: Fault | None, engine: str, overlap: str, number: int = 0, file: str = "state"
) -> tuple[Any, ...]:
    """Train, and return the losses and the state at the end."""
    timeout = lenient(1.0) if fault is not None and fault.held else 10 * LIMIT
    transfer = TransferConfig(tasklet_bytes="64KiB", num_buffers=4, io_engine=engine, io_timeout=timeout)
    zero = PARAMETERS_ON_STORAGE if file == "parameters" else None
    strategy = SmartInfinityStrategy(folder / "storage", transfer=transfer, overlap=overlap, zero=zero)
    with ExitStack() as opened:
        opened.callback(strategy.close)
        disk = Faulty(fault, number, file, opened)
        trainer = quiet_trainer(folder, strategy, max_steps=STEPS, callbacks=[disk])
        module = LitTiny(RECIPE)
        trainer.fit(module)
    return module.losses, disk.state


@functools.cache
def undisturbed(folder: Path) -> tuple[Any, ...]:
    """Return what a training over a disk that works ends with; engine and overlap change no bit of it."""
    return trained(folder, fault=None, engine="auto", overlap="none")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"))


def _is_short(fault: str, engine: str, overlap: str) -> bool:
    """Return whether `make test` runs the case: each fault that could be silent, and each engine and overlap once."""
    return (fault, engine, overlap) in {
        ("flip", "io_uring", "none"),
        ("block", "threads", "none"),
        ("extent", "plain", "none"),
        ("lost", "threads", "backward"),
        ("torn write", "plain", "forward"),
        ("hung write", "threads", "none"),
    }


MATRIX = [
    pytest.param(fault, engine, overlap, marks=[] if _is_short(fault, engine, overlap) else [pytest.mark.long])
    for fault in FAULTS
    for engine in ENGINES
    for overlap in OVERLAPS
]


@pytest.mark.parametrize(("fault", "engine", "overlap"), MATRIX)
@pytest.mark.parametrize("file", [pytest.param("state"), pytest.param("parameters", marks=pytest.mark.long)])
def test_file_of_a_training(
    tmp_path: Path, expected: tuple[Any, ...], attack: Attack, file: str, fault: str, engine: str, overlap: str
) -> None:
    """Nothing is silent and nothing hangs. Where the parameters lie changes no bit of the result either."""
    what = FAULTS[fault]
    attack(f"{what.name}, of the {file} in a training", tries=1, outcome=OUTCOME)
    number = random.Random(f"{fault} {engine} {overlap}").randrange(12)
    try:
        losses, state = trained(tmp_path, fault=what, engine=engine, overlap=overlap, number=number, file=file)
    except SmartInfinityError as error:
        assert not what.harmless, error
        return
    assert losses == expected[0]
    for array, other in zip(state, expected[1], strict=True):
        np.testing.assert_array_equal(array, other)


DAMAGES = {
    "bit flip": flip_bit,
    "block that lies elsewhere": misplace_block,
    "block that was never written": lose_block,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_commit_record(tmp_path: Path, attack: Attack, damage: str) -> None:
    """Recovery finds a generation that was committed, with all of its numbers, or says that there is none."""
    tries = 20
    attack(f"{damage}, in a commit record", tries=tries, outcome="our error, or a committed generation")
    store = create([tmp_path])
    for generation in range(3):
        commit_generation(store, generation)
    path = Path(store.files[0].path).with_name(COMMIT_NAME)
    store.close(remove=False)
    content = path.read_bytes()
    for number in range(tries):
        path.write_bytes(content)
        DAMAGES[damage](path, random.Random(number))
        try:
            store = StateStore.recover([tmp_path])
        except SmartInfinityError:
            continue
        found = store.generation
        assert found in (1, 2)
        assert store.steps.tolist() == [found] * len(store.steps)
        assert store.tasklet_generations.tolist() == [found] * store.extents.num_tasklets
        store.close(remove=False)


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["optim_states", "model_states"])
def test_checkpoint(tmp_path: Path, attack: Attack, name: str, damage: str) -> None:
    """A training that resumes from a damaged checkpoint raises our error or ends with the same bits."""
    tries = 4
    attack(f"{damage}, in a checkpoint", tries=tries, outcome=OUTCOME)
    recipe = Recipe(max_steps=2)
    path = tmp_path / "a.ckpt"
    train(Run(out=str(tmp_path / "a"), recipe=recipe, save_after_fit=str(path)))
    resumed = Run(out=str(tmp_path / "b"), recipe=Recipe(max_steps=3), resume=str(path))
    expected, _, _ = train(resumed)
    (file,) = path.rglob(f"*{name}.pt")
    content = file.read_bytes()
    for number in range(tries):
        file.write_bytes(content)
        DAMAGES[damage](file, random.Random(number))
        try:
            module, _, _ = train(resumed)
        except SmartInfinityError:
            continue
        assert module.losses == expected.losses

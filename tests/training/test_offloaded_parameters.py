"""Parameters offloaded to host memory or storage change no bit, and their buffers do not grow with the model."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageCorruptError, StorageError, StorageFullError
from lightning_smartinfinity.native import IoClass, MemoryPool
from lightning_smartinfinity.storage import TensorStore
from lightning_smartinfinity.zero3.parameters import param_swapper
from tests.helpers import native_testing as testing
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.unnamed import unnamed_files
from tests.training.test_lives import Evaluated
from tests.training.worker import Recorder, Run, train

ENOSPC = 28
# Parameters of at least one block go to storage.
NVME: dict[str, Any] = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
SMALL_RING = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
FULL = Recipe(groups=True, accumulate=2, skip_side_at=(1,), frozen=True, odd=True, max_steps=3)


def run_of(root: Path, recipe: Recipe, zero: dict[str, Any] | None, **settings: Any) -> Run:
    return Run(out=str(root), recipe=recipe, options={"zero": zero} if zero else {}, **settings)


def result(run: Run) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train, assert that nothing is left on storage, and return losses, validation losses and masters."""
    module, trainer, recorder = train(run)
    trainer.strategy.close()  # type: ignore[attr-defined]
    storage = Path(run.out) / "storage"
    assert not list(storage.rglob("*.bin")) and not stored_in(storage)
    return module.losses, module.validated, recorder.masters


def stored_in(folder: Path) -> int:
    """Return the bytes of files without names below a folder, in which parameters lie."""
    return sum(path.stat().st_size for path in unnamed_files(folder))


def assert_same(ours: tuple[Any, Any, dict[str, torch.Tensor]], theirs: tuple[Any, Any, Any]) -> None:
    assert ours[:2] == theirs[:2]
    assert ours[2].keys() == theirs[2].keys()
    for name, master in theirs[2].items():
        assert torch.equal(ours[2][name], master), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains a recipe once with its parameters in memory."""
    known: dict[str, tuple[list[float], list[float], dict[str, torch.Tensor]]] = {}

    def trained(recipe: Recipe) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
        if repr(recipe) not in known:
            known[repr(recipe)] = result(run_of(tmp_path_factory.mktemp("plain"), recipe, None))
        return known[repr(recipe)]

    return trained


WHERE: dict[str, dict[str, Any]] = {
    "cpu": {"offload_param": {"device": "cpu", "pin_memory": True}},
    "nvme": {**NVME, "sub_group_size": 3000},
    # The first sub-groups stay in memory.
    "partly nvme": {**NVME, "sub_group_size": 3000, "offload_param": {"device": "nvme", "max_in_cpu": 9000}},
}


@pytest.mark.parametrize(
    ("where", "precision"),
    long_but(
        [("cpu", "bf16-mixed"), ("nvme", "32-true"), ("nvme", "16-mixed"), ("partly nvme", "bf16-mixed")],
        itertools.product(WHERE, ["32-true", "bf16-mixed", "16-mixed"]),
    ),
)
def test_every_precision_trains_to_the_same_bits(where: str, precision: str, plain: Any, tmp_path: Path) -> None:
    """Accumulation, parameter groups, unused and frozen parameters and a ring of two small buffers change no bit."""
    recipe = dataclasses.replace(FULL, precision=precision)
    assert_same(result(run_of(tmp_path, recipe, WHERE[where], transfer=SMALL_RING)), plain(recipe))


@pytest.mark.parametrize(
    ("zero", "settings"),
    [
        pytest.param({"stage3_prefetch_bucket_size": 0}, {}, marks=pytest.mark.long),
        ({"stage3_max_reuse_distance": 10**9, "offload_param": {"device": "nvme", "buffer_count": 100}}, {}),
        pytest.param({"stage3_param_persistence_threshold": 2100}, {}, marks=pytest.mark.long),
        ({"overlap_comm": True, "offload_param": {"device": "nvme", "pin_memory": False}}, {}),
        ({}, {"transfer": {"durability": "none", "direct_io": "off", "num_buffers": 3}}),
    ],
    ids=["no prefetch", "parameters stay gathered", "some persistent", "overlap_comm", "one place"],
)
def test_settings_change_nothing(zero: dict[str, Any], settings: Any, plain: Any, tmp_path: Path) -> None:
    """Settings for gathering, keeping and prefetching parameters change no bit."""
    recipe = Recipe(precision="bf16-mixed", epoch_batches=2, max_steps=3, validate=True)
    assert_same(result(run_of(tmp_path, recipe, {**NVME, **zero}, **settings)), plain(recipe))


class ReadAhead(pl.Callback):
    """A callback that starts to read parameters right before the step that changes them.

    Args:
        waits: Whether it also waits until they are read.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._waits = waits

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        swapper = trainer.strategy._parameters  # type: ignore[attr-defined]
        absent = [param for param in pl_module.parameters() if param.ds_tensor.numel() == 0][:2]
        assert len(absent) == 2
        swapper.swap_in(absent[:1], async_op=True)
        swapper.swap_in(absent[1:], async_op=not self._waits)


def test_what_was_read_before_a_step_is_not_used_after_it(plain: Any, tmp_path: Path) -> None:
    """Parameters that are being read, or are read but not gathered, when the step begins change no bit."""
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    module, recorder = LitTiny(recipe), Recorder(run_of(tmp_path, recipe, None))
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero=NVME)
    quiet_trainer(tmp_path, strategy, callbacks=[recorder, ReadAhead()], max_steps=2).fit(module)
    strategy.close()
    assert_same((module.losses, [], recorder.masters), plain(recipe))


def test_what_forward_waits_for_goes_before_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are read before other transfers and written after them, and what nobody needs is not read."""
    started, cancelled = set(), []
    start, cancel = TensorStore._start, TensorStore.cancel

    def record_start(store: TensorStore, begin: Any, stored: Any, memory: Any, offset: int, io_class: IoClass) -> int:
        started.add((begin.__name__, io_class))
        return start(store, begin, stored, memory, offset, io_class)

    def record_cancel(store: TensorStore, ticket: int) -> bool:
        cancelled.append(ticket)
        return cancel(store, ticket)

    monkeypatch.setattr(TensorStore, "_start", record_start)
    monkeypatch.setattr(TensorStore, "cancel", record_cancel)
    module = LitTiny(Recipe(precision="bf16-mixed", max_steps=2))
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero=NVME)
    quiet_trainer(tmp_path, strategy, callbacks=[ReadAhead(waits=False)], max_steps=2).fit(module)
    strategy.close()
    assert {("read", IoClass.GATHER), ("write", IoClass.WRITE_BEHIND)} <= started
    assert {io_class for name, io_class in started if name == "write"} == {IoClass.WRITE_BEHIND}
    assert cancelled


def test_the_default_threshold_keeps_small_parameters_in_memory(plain: Any, tmp_path: Path) -> None:
    """By default only parameters that DeepSpeed does not keep gathered are on storage, and no bit changes."""
    recipe = Recipe(precision="bf16-mixed", width=192, depth=1, tied=False, max_steps=2)
    module, trainer, recorder = train(run_of(tmp_path, recipe, {"offload_param": {"device": "nvme"}}))
    large = [p.ds_numel for p in module.parameters() if p.ds_numel > 100_000]
    assert trainer.strategy.parameter_bytes == 2 * sum(large) > 0  # type: ignore[attr-defined]
    trainer.strategy.close()  # type: ignore[attr-defined]
    assert_same((module.losses, module.validated, recorder.masters), plain(recipe))


@pytest.mark.parametrize(
    ("saved_with", "resumed_with"), long_but([(NVME, None)], [(NVME, NVME), (NVME, None), (None, NVME)])
)
def test_resuming(saved_with: Any, resumed_with: Any, plain: Any, tmp_path: Path) -> None:
    """A resumed run equals an uninterrupted one, with parameters on storage before, after, or both."""
    recipe = Recipe(precision="bf16-mixed", frozen=True, max_steps=2)
    first = dataclasses.replace(recipe, max_steps=1)
    result(run_of(tmp_path / "first", first, saved_with, save_at=(1,)))
    checkpoint = str(tmp_path / "first" / "step-1.ckpt")
    losses, _, masters = result(run_of(tmp_path / "second", recipe, resumed_with, resume=checkpoint))
    whole = plain(recipe)
    assert_same((losses, [], masters), (whole[0][1:], [], whole[2]))


class Configured(LitTiny):
    """A module that builds its model in configure_model and records how many bytes are on storage then."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = None  # type: ignore[assignment]
        self.stored_bytes = -1

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.recipe.build_model()
            self.stored_bytes = self.trainer.strategy.parameter_bytes


def test_a_model_built_in_configure_model_goes_to_storage_as_it_is_built(tmp_path: Path) -> None:
    """Parameters are on storage before the optimizer exists, also in the default folder, and no bit changes."""
    recipe = Recipe(precision="bf16-mixed", tied=False, max_steps=2)
    outcomes = []
    for zero in (None, NVME):
        root = tmp_path / str(zero is None)
        module, recorder = Configured(recipe), Recorder(run_of(root, recipe, None))
        trainer = quiet_trainer(root, SmartInfinityStrategy(zero=zero), callbacks=[recorder], max_steps=2)
        trainer.fit(module)
        outcomes.append((module.losses, [], recorder.masters))
        if zero is not None:
            stored = sum(-(-2 * p.ds_numel // 4096) * 4096 for p in module.parameters() if p.ds_numel >= 2048)
            assert module.stored_bytes == trainer.strategy.parameter_bytes == stored
            assert stored_in(root / "smart_infinity") >= stored
        trainer.strategy.close()
    assert_same(*outcomes)


def test_the_life_of_a_model_on_storage(tmp_path: Path) -> None:
    """Fits, validation, tests and a checkpoint equal those in memory, and close() removes the model from storage."""
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    module, other = Evaluated(recipe), Evaluated(recipe)
    expected, found = [], []
    for target, zero, results in ((module, NVME, found), (other, None, expected)):
        root = tmp_path / str(zero is None)
        first = quiet_trainer(root, SmartInfinityStrategy(root / "s", zero=zero), max_steps=2, limit_val_batches=2)
        results += first.validate(target, verbose=False)
        first.fit(target)
        results += first.validate(target, verbose=False)
        first.save_checkpoint(root / "saved.ckpt")
        second = quiet_trainer(root, SmartInfinityStrategy(root / "s", zero=zero), max_steps=2, limit_test_batches=2)
        second.fit(target)
        results += second.test(target, verbose=False)
        fresh = quiet_trainer(root, SmartInfinityStrategy(root / "t", zero=zero), limit_val_batches=2)
        results += fresh.validate(Evaluated(recipe), ckpt_path=str(root / "saved.ckpt"), verbose=False)
        fresh.strategy.close()
        second.strategy.close()
    assert found == expected
    assert module.losses == other.losses
    assert not list(tmp_path.rglob("*.bin")) and not stored_in(tmp_path)
    with pytest.raises(StorageError, match="removed from storage when its strategy was closed"):
        quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "s", zero=NVME)).test(module, verbose=False)


class Closing(pl.Callback):
    """Closes another strategy between two steps."""

    def __init__(self, other: SmartInfinityStrategy) -> None:
        self.other = other

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.other.close()


@pytest.mark.parametrize("does", long_but(["fit"], ["fit", "validate"]))
def test_closing_an_earlier_strategy_leaves_a_later_training_alone(does: str, tmp_path: Path, plain: Any) -> None:
    """A training goes on to the same bits when a strategy is closed that used the same storage before it."""
    recipe = Recipe(precision="bf16-mixed", max_steps=3)
    earlier = SmartInfinityStrategy(tmp_path / "storage", zero=NVME)
    getattr(quiet_trainer(tmp_path, earlier, max_steps=1, limit_val_batches=1), does)(Evaluated(recipe))
    later = SmartInfinityStrategy(tmp_path / "storage", zero=NVME)
    module = Evaluated(recipe)
    fit(module, tmp_path, later, max_steps=3, limit_val_batches=0, callbacks=[Closing(earlier)])
    assert module.losses == plain(recipe)[0]
    assert stored_in(tmp_path)
    later.close()
    assert not stored_in(tmp_path)


def test_closing_a_later_strategy_leaves_an_earlier_one_alone(tmp_path: Path) -> None:
    """A model stays on storage when a strategy is closed that evaluated another one there."""
    recipe = Recipe(precision="bf16-mixed", max_steps=1)
    module = Evaluated(recipe)
    first = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "s", zero=NVME), max_steps=1, limit_val_batches=1)
    first.fit(module)
    expected = first.validate(module, verbose=False)
    second = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "s", zero=NVME), limit_val_batches=1)
    second.validate(Evaluated(recipe), verbose=False)
    second.strategy.close()
    assert first.validate(module, verbose=False) == expected
    first.strategy.close()
    assert not list(tmp_path.rglob("*.bin")) and not stored_in(tmp_path)


def test_buffers_do_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak host memory for parameters is the same for a deeper model, and within the limit."""
    most, original = [0], param_swapper.lent_tensor

    def lend(pool: MemoryPool, nbytes: int) -> torch.Tensor:
        taken = original(pool, nbytes)
        most[0] = max(most[0], pool.nbytes)
        return taken

    monkeypatch.setattr(param_swapper, "lent_tensor", lend)
    held = []
    for depth in (4, 8):
        recipe = Recipe(precision="bf16-mixed", depth=depth, max_steps=3)
        zero = {**NVME, "stage3_prefetch_bucket_size": 5000}
        run = run_of(tmp_path / str(depth), recipe, zero, transfer=SMALL_RING)
        # What an update beside the next forward lends depends on when it gets there.
        _, trainer, _ = train(dataclasses.replace(run, options={**run.options, "overlap": "none"}))
        strategy: Any = trainer.strategy
        assert not any(flat is not None for flat in trainer.optimizers[0].fp16_partitioned_groups_flat)
        assert most[0] <= strategy._parameters.limit_bytes < strategy.parameter_bytes
        held.append((most[0], strategy.host_bytes["ring"]))
        most[0] = 0
        strategy.close()
    assert held[0] == held[1]


def test_free_space_is_checked_for_parameters_and_state_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk with room for the state alone is refused before anything is written."""
    module = LitTiny(Recipe(precision="bf16-mixed"))
    numel = sum(param.numel() for param in module.parameters())
    # This is enough for the state, lock, manifest and commit record, and for a few of the parameters.
    free = numel * 24 + 256 * 1024
    real = os.statvfs(tmp_path)
    blocks = SimpleNamespace(f_bavail=free // real.f_frsize, f_frsize=real.f_frsize)
    monkeypatch.setattr("lightning_smartinfinity.storage.state.space.os.statvfs", lambda path: blocks)
    monkeypatch.setattr(
        "lightning_smartinfinity.storage.state.space.deal", lambda sizes, n: [sum(sizes) + 256 * 1024] * n
    )
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=NVME)
    with pytest.raises(StorageFullError, match="The optimizer state and the parameters need"):
        quiet_trainer(tmp_path, strategy).fit(module)
    assert not (tmp_path / "s").exists()


def test_too_few_buffers_say_so(plain: Any, tmp_path: Path) -> None:
    """Parameters needed at the same time are held beyond the configured buffers, with one warning."""
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    zero = {**NVME, "offload_param": {"device": "nvme", "buffer_count": 1, "buffer_size": 2048}}
    with pytest.warns(UserWarning, match=r"'buffer_count': 1, 'buffer_size': 2048.*has 4096\.") as seen:
        assert_same(result(run_of(tmp_path, recipe, zero)), plain(recipe))
    assert sum("buffer_count" in str(warning.message) for warning in seen) == 1


class Faulty(pl.Callback):
    """A callback that makes transfers of parameters fail in the third step."""

    def __init__(self, **faults: int) -> None:
        self.faults = faults

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.strategy.drain()  # type: ignore[attr-defined]  # the update of the step before writes, too
            testing.inject(trainer.strategy._parameters.store.core, **self.faults)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        ({"fail_read_at": 3}, StorageError),
        ({"fail_write_at": 1}, StorageError),
        ({"fail_write_at": 0, "errno": ENOSPC}, StorageFullError),
    ],
    ids=["a read", "a write", "a full disk"],
)
def test_a_transfer_that_fails(faults: dict[str, int], error: type[StorageError], tmp_path: Path) -> None:
    """The error names the file. The parameters are those of the last committed step and can be saved."""
    module = LitTiny(Recipe(precision="bf16-mixed", max_steps=4))
    strategy = SmartInfinityStrategy(tmp_path / "s", overlap="none", zero=NVME)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[Faulty(**faults)], max_steps=4)
    with pytest.raises(error, match=r"Parameters: (reading|writing) .*unnamed file"):
        trainer.fit(module)
    optimizer = trainer.strategy.optimizers[0]
    assert optimizer.update.drained_handler().generation == 2
    for param in optimizer.module.parameters():
        values = param.nvme_swapper.read_partition(param) if param.ds_tensor.numel() == 0 else param.ds_tensor
        assert torch.equal(values.view(param.ds_shape), optimizer.get_full_hp_param(param).to(torch.bfloat16))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    strategy.close()


class Spoiling(pl.Callback):
    """A callback that damages a parameter on storage, between two steps and without a word."""

    def __init__(self, damage: str) -> None:
        self.damage = damage
        self.before = b""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.drain()  # type: ignore[attr-defined]  # the update of the step before writes, too
        absent = [param for param in pl_module.parameters() if param.ds_tensor.numel() == 0 and param.requires_grad]
        param = max(absent, key=lambda param: param.smart_infinity_stored.nbytes)
        extent = param.smart_infinity_stored.extent
        values = param.nvme_swapper.read_partition(param).view(torch.uint8).numpy().tobytes()
        # Activations that are offloaded, too, have a file without a name in the same folder.
        files = unnamed_files(Path(extent.path).parent)
        (path,) = (each for each in files if each.read_bytes()[extent.offset :].startswith(values))
        with path.open("r+b") as file:
            file.seek(extent.offset)
            content = bytearray(file.read(extent.nbytes))
            if trainer.global_step == 1:
                self.before = bytes(content[:4096])
            if trainer.global_step != 2:
                return
            if self.damage == "a flipped bit":
                content[10] ^= 1
            else:
                content[:4096] = content[4096:8192] if self.damage == "a wrong block" else self.before
            file.seek(extent.offset)
            file.write(content)


@pytest.mark.parametrize("damage", ["a flipped bit", "a wrong block", "a lost write"])
def test_a_parameter_that_storage_changed(damage: str, tmp_path: Path, attack: Attack) -> None:
    """Training does not go on with a parameter that is not what was written: it raises with the file's name."""
    attack(f"{damage} in parameters on storage", tries=1, outcome="StorageCorruptError with path and offset")
    module = LitTiny(Recipe(precision="bf16-mixed", max_steps=4))
    strategy = SmartInfinityStrategy(tmp_path / "s", overlap="none", zero=NVME)
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[Spoiling(damage)], max_steps=4)
    with pytest.raises(StorageCorruptError, match=r"Parameters: the block at offset \d+ of .*unnamed file\) does not"):
        trainer.fit(module)
    assert trainer.global_step == 2
    strategy.close()

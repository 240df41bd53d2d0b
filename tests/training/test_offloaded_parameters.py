"""Parameters on storage: when they move, what memory they take, what closes them, budgets, and storage that fails."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from lightning_smartinfinity import (
    ConfigError,
    SmartInfinityStrategy,
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from lightning_smartinfinity.native import IoClass
from lightning_smartinfinity.storage import TensorStore
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks
from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper, stored_parameter
from tests.helpers import native_testing as testing
from tests.helpers.assertions import refused
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer
from tests.helpers.unnamed import unnamed_files
from tests.training.actions import does
from tests.training.test_overlap import NVME, SMALL_RING, assert_same, result
from tests.training.worker import Run, each_rank, prepared, train

ENOSPC = 28


def run_of(
    root: Path, recipe: Recipe, zero: dict[str, Any] | None, *, budget: int | str = "auto", **options: Any
) -> Run:
    transfer = {**SMALL_RING, "parameter_bytes": budget}
    return Run(out=str(root), recipe=recipe, transfer=transfer, options={"zero": zero, **options})


def stored_in(folder: Path) -> int:
    """Return the bytes of files without names below a folder, in which parameters lie."""
    return sum(path.stat().st_size for path in unnamed_files(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains a recipe once with its parameters in memory."""
    known: dict[str, Any] = {}

    def trained(recipe: Recipe) -> Any:
        if repr(recipe) not in known:
            known[repr(recipe)] = result(run_of(tmp_path_factory.mktemp("plain"), recipe, None))
        return known[repr(recipe)]

    return trained


@pytest.mark.parametrize("waits", [True, False])
def test_what_was_read_before_a_step_is_not_used_after_it(
    waits: bool, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads that a step makes stale change no bit. What forward waits for goes first, what nobody needs is not read."""
    started, cancelled = set(), []
    start, cancel = TensorStore._start, TensorStore.cancel

    def record_start(store: TensorStore, begin: Any, stored: Any, memory: Any, offset: int, io_class: IoClass) -> int:
        started.add((begin.__name__, io_class))
        return start(store, begin, stored, memory, offset, io_class)

    def read_ahead(trainer: Any, module: Any) -> None:
        absent = [param for param in module.parameters() if param.ds_tensor.numel() == 0][:2]
        trainer.strategy._parameters.swap_in(absent[:1], async_op=True)
        trainer.strategy._parameters.swap_in(absent[1:], async_op=not waits)

    monkeypatch.setattr(TensorStore, "_start", record_start)
    monkeypatch.setattr(TensorStore, "cancel", lambda *args: (cancelled.append(args[1]), cancel(*args))[1])
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    assert_same(result(run_of(tmp_path, recipe, NVME), does(on_before_optimizer_step=read_ahead)), plain(recipe))
    assert (("read", IoClass.GATHER) in started and waits) or (
        cancelled and {io_class for name, io_class in started if name == "write"} == {IoClass.WRITE_BEHIND}
    )


def test_the_default_threshold_keeps_small_parameters_in_memory(plain: Any, tmp_path: Path) -> None:
    """By default only parameters that DeepSpeed does not keep gathered are on storage, and no bit changes."""
    recipe = Recipe(precision="bf16-mixed", width=192, depth=1, tied=False, max_steps=2)
    large = [p.numel() for p in recipe.build_model().parameters() if p.numel() > 100_000]

    def look(strategy: Any) -> None:
        assert strategy.parameter_bytes == 2 * sum(large) > 0

    assert_same(result(run_of(tmp_path, recipe, {"offload_param": {"device": "nvme"}}), look=look), plain(recipe))


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


def test_the_life_of_a_model_on_storage(tmp_path: Path) -> None:
    """Fits, validation, tests and a checkpoint equal those in memory, and close() removes the model from storage."""
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    module, other = Everything(recipe), Everything(recipe)
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
        results += fresh.validate(Everything(recipe), ckpt_path=str(root / "saved.ckpt"), verbose=False)
        fresh.strategy.close()
        second.strategy.close()
    assert (
        found == expected
        and module.losses == other.losses
        and not list(tmp_path.rglob("*.bin"))
        and not stored_in(tmp_path)
    )
    with pytest.raises(StorageError, match="removed from storage when its strategy was closed"):
        quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "s", zero=NVME)).test(module, verbose=False)


def test_closing_one_strategy_leaves_the_other_alone(tmp_path: Path, plain: Any) -> None:
    """A training goes on to the same bits, and its model stays, when strategies are closed that used its storage.

    One trained there before it, and one evaluated another model there since.
    """
    recipe = Recipe(precision="bf16-mixed", max_steps=3)
    earlier, later, other = (SmartInfinityStrategy(tmp_path / "storage", zero=NVME) for _ in range(3))
    quiet_trainer(tmp_path, earlier, max_steps=1).fit(Everything(recipe))
    closing = does(on_train_batch_start=lambda trainer, module: trainer.global_step == 1 and earlier.close())
    module = Everything(recipe)
    trainer = quiet_trainer(tmp_path, later, max_steps=3, limit_val_batches=0, callbacks=[closing])
    trainer.fit(module)
    assert module.losses == plain(recipe)[0][0] and stored_in(tmp_path)
    trainer.limit_val_batches = 1
    expected = trainer.validate(module, verbose=False)
    quiet_trainer(tmp_path, other, limit_val_batches=1).validate(Everything(recipe), verbose=False)
    other.close()
    assert trainer.validate(module, verbose=False) == expected
    later.close()
    assert not list(tmp_path.rglob("*.bin")) and not stored_in(tmp_path)


def test_too_few_buffers_say_so(plain: Any, tmp_path: Path) -> None:
    """Parameters needed at the same time are held beyond the configured buffers, with one warning."""
    recipe = Recipe(precision="bf16-mixed", max_steps=2)
    zero = {**NVME, "offload_param": {"device": "nvme", "buffer_count": 1, "buffer_size": 2048}}
    with pytest.warns(UserWarning, match=r"'buffer_count': 1, 'buffer_size': 2048.*has 4096\.") as seen:
        assert_same(result(run_of(tmp_path, recipe, zero)), plain(recipe))
    assert sum("buffer_count" in str(warning.message) for warning in seen) == 1


def test_buffers_do_not_grow_with_the_model(tmp_path: Path, most: list[int]) -> None:
    """The peak host memory for parameters is the same for a deeper model, and within the limit."""
    held = []
    for depth in (4, 8):
        recipe = Recipe(precision="bf16-mixed", depth=depth, max_steps=3)
        zero = {**NVME, "stage3_prefetch_bucket_size": 5000}
        # What an update beside the next forward lends depends on when it gets there.
        _, trainer, _ = train(run_of(tmp_path / str(depth), recipe, zero, overlap="none"))
        strategy: Any = trainer.strategy
        assert (
            not any(flat is not None for flat in trainer.optimizers[0].fp16_partitioned_groups_flat)
            and most[0] <= strategy._parameters.limit_bytes < strategy.parameter_bytes
        )
        held.append((most[0], strategy.host_bytes["ring"]))
        most[0] = 0
        strategy.close()
    assert held[0] == held[1]


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

    def arm(trainer: Any, module: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.drain()  # the update of the step before writes, too
            testing.inject(trainer.strategy._parameters.store.core, **faults)

    run = run_of(tmp_path, Recipe(precision="bf16-mixed", max_steps=4), NVME, overlap="none")
    module, trainer, _ = prepared(run, does(on_train_batch_start=arm))
    with pytest.raises(error, match=r"Parameters: (reading|writing) .*unnamed file"):
        trainer.fit(module)
    optimizer: Any = trainer.strategy.optimizers[0]
    assert optimizer.update.drained_handler().generation == 2
    for param in optimizer.module.parameters():
        values = param.nvme_swapper.read_partition(param) if param.ds_tensor.numel() == 0 else param.ds_tensor
        assert torch.equal(values.view(param.ds_shape), optimizer.get_full_hp_param(param).to(torch.bfloat16))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")


def test_a_read_that_fails_on_one_rank_raises_on_both(tmp_path: Path) -> None:
    """A read fails in the middle of forward. Neither rank waits for the other, and nothing is left on storage."""
    seen = each_rank("failing_read", tmp_path)
    assert (
        seen[0] == seen[1] == {"met": seen[0]["met"], "left": []}
        and seen[0]["met"].startswith("StorageError: Parameters: reading ")
        and "unnamed file" in seen[0]["met"]
    )


@pytest.mark.parametrize("damage", ["a flipped bit", "a wrong block", "a lost write"])
def test_a_parameter_that_storage_changed(damage: str, tmp_path: Path, attack: Attack) -> None:
    """Training does not go on with a parameter that is not what was written: it raises with the file's name."""
    attack(f"{damage} in parameters on storage", tries=1, outcome="StorageCorruptError with path and offset")
    before = b""

    def spoil(trainer: Any, module: Any) -> None:
        nonlocal before
        trainer.strategy.drain()  # the update of the step before writes, too
        absent = [param for param in module.parameters() if param.ds_tensor.numel() == 0 and param.requires_grad]
        param = max(absent, key=lambda param: param.smart_infinity_stored.nbytes)
        extent = param.smart_infinity_stored.extent
        values = param.nvme_swapper.read_partition(param).view(torch.uint8).numpy().tobytes()
        # Activations that are offloaded, too, have a file without a name in the same folder.
        files = unnamed_files(Path(extent.path).parent)
        (path,) = (each for each in files if each.read_bytes()[extent.offset :].startswith(values))
        content = bytearray(path.read_bytes()[extent.offset : extent.offset + extent.nbytes])
        if trainer.global_step == 1:
            before = bytes(content[:4096])
        if trainer.global_step == 2:
            flipped = bytes([*content[:10], content[10] ^ 1, *content[11:4096]])
            spoilt = {"a flipped bit": flipped, "a wrong block": content[4096:8192], "a lost write": before}
            with path.open("r+b") as file:
                file.seek(extent.offset)
                file.write(spoilt[damage])

    run = run_of(tmp_path, Recipe(precision="bf16-mixed", max_steps=4), NVME, overlap="none")
    module, trainer, _ = prepared(run, does(on_train_batch_start=spoil))
    with pytest.raises(StorageCorruptError, match=r"Parameters: the block at offset \d+ of .*unnamed file\) does not"):
        trainer.fit(module)
    assert trainer.global_step == 2


STORED = {"offload_param": {"device": "nvme"}}
BUDGETED = Recipe(precision="bf16-mixed", width=64, depth=4, groups=True, accumulate=2, frozen=True, max_steps=4)


def least_budget(root: Path, recipe: Recipe) -> int:
    """Return what the error says that a model needs."""
    strategy = SmartInfinityStrategy(root / "s", zero=STORED, transfer={"parameter_bytes": 1})
    with pytest.raises(ConfigError, match="parameter_bytes=1") as caught:
        quiet_trainer(root, strategy, precision=recipe.precision).fit(LitTiny(recipe))
    assert not (root / "s").exists()
    return int(re.search(r"at least (\d+)", caught.value.remedy)[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("times", "tied", "overlap"),
    long_but(
        [(1, True, "forward")],
        itertools.product([1, 2], [False, True], ["none", "forward", "backward"]),
    ),
)
def test_no_bit_changes_and_no_byte_is_beyond_the_budget(
    times: float, tied: bool, overlap: str, tmp_path: Path, most: list[int]
) -> None:
    """What lies in memory for parameters never exceeds the budget, with one that holds the largest module only, too."""
    recipe = dataclasses.replace(BUDGETED, tied=tied)
    straight = result(run_of(tmp_path / "straight", recipe, None, overlap="none"))
    assert most == [0]
    budget = times * least_budget(tmp_path, recipe)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*in use at once")
        assert_same(result(run_of(tmp_path / "budget", recipe, STORED, budget=budget, overlap=overlap)), straight)
    assert 0 < most[0] <= budget


@pytest.mark.parametrize("overlap", long_but(["backward"], ["none", "forward", "backward"]))
def test_each_parameter_is_written_once_in_a_step(overlap: str, tmp_path: Path) -> None:
    """A step writes as many bytes as the parameters that it updates have on storage."""
    written: list[int] = []

    def note(trainer: Any, module: Any) -> None:
        trainer.strategy.drain()
        written.append(trainer.strategy._parameters.store.counters().written_bytes)

    run = run_of(tmp_path, dataclasses.replace(BUDGETED, accumulate=1), STORED, budget=100_000, overlap=overlap)
    module, *_ = train(run, does(on_train_batch_end=note))
    stored = [(stored_parameter(param), param.requires_grad) for param in module.parameters()]
    nbytes = sum(whole_blocks(each.nbytes) for each, updated in stored if each is not None and updated)
    assert nbytes > 0 and [b - a for a, b in itertools.pairwise(written)] == 3 * [nbytes]


def test_parameters_are_read_before_their_module_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step has shown in which order modules run, each read begins while another module gets its parameters."""
    ahead, late = Counter[int](), Counter[int]()  # by step
    needed: list[set[Any]] = []  # by the module that gets its parameters
    fetch, start = PartitionedParameterCoordinator.fetch_sub_module, ParameterSwapper._start_reads

    def fetching(coordinator: Any, sub_module: Any, forward: bool) -> None:
        needed[:] = [set(sub_module.parameters(recurse=False))]
        fetch(coordinator, sub_module, forward)

    def starting(swapper: ParameterSwapper, params: Any) -> None:
        for own in needed:
            ahead[module.trainer.global_step] += len(set(params) - own)
            late[module.trainer.global_step] += len(set(params) & own)
        start(swapper, params)

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", fetching)
    monkeypatch.setattr(ParameterSwapper, "_start_reads", starting)
    recipe = dataclasses.replace(BUDGETED, accumulate=1, tied=False, max_steps=3)
    module, trainer, _ = prepared(run_of(tmp_path, recipe, STORED, budget=100_000, overlap="none"))
    trainer.fit(module)
    stored = sum(stored_parameter(param) is not None for param in module.parameters())
    assert (late[0], ahead[0], late[2]) == (2 * stored, 0, 0)  # in forward and in backward
    # What the end of forward has used is still in memory when backward begins.
    assert 1.5 * stored < ahead[2] <= 2 * stored


@pytest.mark.parametrize("times", long_but([1], [1, 2]))
def test_two_processes_keep_a_budget(times: int, tmp_path: Path) -> None:
    """Gathered parameters and partitions together never exceed the budget of a rank, and no bit changes."""
    outcomes = []
    # Whole blocks of half of the largest tensor, of 64 * 256 elements, and of its bias; and twice as much gathered.
    least = 3 * (64 * 256 + 4096)
    for budget in (0, times * least):
        outcomes.append(each_rank("parameter_budget", tmp_path / str(budget), budget))
        for outcome in outcomes[-1] if budget else ():
            assert outcome["warnings"] == [] and 0 < outcome["most"] <= budget
    plain, budgeted = ([outcome["losses"] for outcome in of_ranks] for of_ranks in outcomes)
    assert budgeted == plain


class Initialised(Configured, Everything):
    """Initialises the model's parameters once all of it is built, as models of transformers do."""

    def configure_model(self) -> None:
        super().configure_model()
        for param in self.model.parameters():  # type: ignore[union-attr]
            torch.nn.init.normal_(param, std=0.02)


def test_a_model_that_is_built_on_storage(tmp_path: Path, most: list[int]) -> None:
    """The budget holds while configure_model builds and initialises, in an evaluation, and in a fit after it.

    A parameter that does not fit is named there.
    """
    recipe = dataclasses.replace(BUDGETED, accumulate=1, max_steps=2)
    budget = least_budget(tmp_path / "whole", recipe)
    strategy = SmartInfinityStrategy(tmp_path / "small", zero=STORED, transfer={"parameter_bytes": 20_000})
    named = r"parameter_bytes=20000\).*'Linear.weight' takes 24576 bytes."
    with refused(ConfigError, match=named, remedy="at least 24576"):
        quiet_trainer(tmp_path, strategy, precision=BUDGETED.precision).fit(Initialised(recipe))
    found = []
    for zero, transfer in ((None, {}), (STORED, {"parameter_bytes": budget})):
        strategy = SmartInfinityStrategy(tmp_path / str(zero is None), zero=zero, transfer=transfer)
        trainer = quiet_trainer(tmp_path, strategy, max_steps=2, limit_val_batches=4, precision=BUDGETED.precision)
        torch.manual_seed(3)
        module = Initialised(recipe)
        evaluated = trainer.validate(module, verbose=False)
        trainer.fit(module)
        found.append((evaluated, module.losses))
        assert (module.stored_bytes > 0) == (zero is not None)  # before the optimizer exists
        strategy.close()
    assert found[0] == found[1] and 0 < most[0] <= budget


@pytest.mark.parametrize(
    ("width", "budget", "named", "least"),
    [
        (64, 32_767, r"'model.blocks.0.up.weight' takes 32768 bytes", 36_864),
        (64, 33_000, r"'model.blocks.0.up.weight', 'model.blocks.0.up.bias' are used together, and take 33280", 36_864),
    ],
    ids=["a tensor", "a module"],
)
def test_what_does_not_fit_is_named(width: int, budget: int, named: str, least: int, tmp_path: Path) -> None:
    """The largest tensor is named if it does not fit by itself, otherwise the parameters that are used together."""
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=STORED, transfer={"parameter_bytes": budget})
    trainer = quiet_trainer(tmp_path, strategy, precision="bf16-true")
    with pytest.raises(ConfigError, match=rf"parameter_bytes={budget}\) is too little .*{named}") as caught:
        trainer.fit(LitTiny(Recipe(width=width, depth=1)))
    assert caught.value.remedy == f"Pass at least {least}." and not (tmp_path / "s").exists()

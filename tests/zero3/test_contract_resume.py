"""Tests the private seams of Lightning, DeepSpeed and torch that checkpoints, an exact resume and endings rely on."""

from __future__ import annotations

import inspect
import io
import signal
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.tuner import tuning
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GenerationMixin
from transformers.integrations import is_fsdp_managed_module

from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.integrations.trainer import loader_order
from lightning_smartinfinity.integrations.trainer.checkpoint_index import _FIELDS, _SAVED_ON_SLURM
from lightning_smartinfinity.resume import loops
from lightning_smartinfinity.zero3.checkpoints.folders import staged_save
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import FILES_BESIDE, LATEST
from lightning_smartinfinity.zero3.checkpoints.formats import whole_file
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import CHECKSUMMED
from lightning_smartinfinity.zero3.parameters import module_copies
from lightning_smartinfinity.zero3.ranks.locations import _counts, _kind_of, _params_in
from lightning_smartinfinity.zero3.ranks.watchdog import _is_of_collective
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import assert_same_tensors, convert, convert_by_command, save_of_two, tensors
from tests.training.actions import does
from tests.zero3.test_contract import lacking, passed


@pytest.mark.seam("the first epoch after a resume creates its iterator where every epoch does")
@pytest.mark.parametrize("resuming", [True, False])
def test_epoch_creates_its_iterator_unless_it_resumes(resuming: bool) -> None:
    """_TrainingEpochLoop.on_run_start reads _FitLoop._resuming_from_checkpoint, which we clear."""
    fit_loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    fit_loop._resuming_from_checkpoint = resuming
    loop, fetcher = mock.MagicMock(restarting=False), mock.MagicMock()
    loop.trainer.current_epoch, loop.trainer.fit_loop = 1, fit_loop
    _TrainingEpochLoop.on_run_start(loop, fetcher)
    assert fetcher.__iter__.called != resuming, "a resumed epoch would draw its seed at another time"


@pytest.mark.seam("we save the position in the epoch, warn once, and load states of loaders that were set up early")
def test_loops_have_what_a_resume_asks_them() -> None:
    """_FitLoop has _data_fetcher, _combined_loader, _combined_loader_states_to_load and _load_combined_loader_states;
    _TrainingEpochLoop has batch_progress, restarted_on_train_batch_end, _should_check_val_fx, and warns of a loader
    without state.
    """
    fit_loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    epoch_loop = fit_loop.epoch_loop
    assert fit_loop._data_fetcher is fit_loop._combined_loader is fit_loop._load_combined_loader_states() is None
    assert fit_loop._combined_loader_states_to_load == [] and epoch_loop.batch_progress.current.ready == 0
    assert epoch_loop.batch_progress.is_last_batch is epoch_loop.restarted_on_train_batch_end is False
    assert passed(epoch_loop._should_check_val_fx) == ["data_fetcher"] and _DataFetcher().length is None
    texts = [text for text in _TrainingEpochLoop.reset.__code__.co_consts if isinstance(text, str)]
    assert any(text.startswith(loops._LIGHTNING_WARNING) for text in texts), "a resumed user is warned twice"


@pytest.mark.seam("checkpoints record the next action of a fit, and a resumed fit goes on with it")
def test_loops_say_what_comes_next() -> None:
    """The state of _FitLoop has epoch_progress and epoch_loop.batch_progress, whose numbers are those of the loops.
    _TrainingEpochLoop has _num_ready_batches_reached, _skip_next_val and val_loop, which has _has_run.
    """
    fit_loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    saved = fit_loop.state_dict()
    for progress in (saved["epoch_progress"], saved["epoch_loop.batch_progress"]):
        assert all({*progress[of]} == {"ready", "started", "processed", "completed"} for of in ("current", "total"))
    assert saved["epoch_loop.batch_progress"]["is_last_batch"] is False
    epoch_loop = fit_loop.epoch_loop
    assert epoch_loop._skip_next_val is epoch_loop.val_loop._has_run is epoch_loop._num_ready_batches_reached() is False


@pytest.mark.seam("passed_to_run: a user's consent to other types in a checkpoint")
@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_the_trainer_knows_weights_only_where_it_restores(method: str, given: bool | None, tmp_path: Path) -> None:
    """Trainer._run has weights_only, until _restore_modules_and_callbacks with restore_checkpoint_after_setup."""

    class AfterSetup(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((kwargs.get("weights_only"), loops.passed_to_run(trainer, "weights_only")))
            raise ZeroDivisionError

    seen: list[Any] = []
    strategy = AfterSetup(torch.device("cpu"), accelerator=CPUAccelerator())
    trainer = pl.Trainer(strategy=strategy, logger=False, enable_checkpointing=False, enable_model_summary=False)
    loader = torch.utils.data.DataLoader([torch.zeros(1)])
    with pytest.raises(ZeroDivisionError):
        getattr(trainer, method)(BoringModel(), loader, ckpt_path=str(tmp_path), weights_only=given)
    assert seen == [(None, given)], "if Lightning passes it on, passed_to_run can go"
    assert loops.passed_to_run(trainer, "weights_only") is None


@pytest.mark.seam("a resumed epoch draws what the saved one drew, by _index_sampler; other loaders are not rebuilt")
def test_a_loader_resets_the_iterator_of_persistent_workers() -> None:
    """DataLoader.__iter__ resets the _iterator of persistent workers; _get_iterator makes others, which draw a seed."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "generator": torch.Generator()}
    loader = DataLoader(range(4), **options)  # type: ignore[arg-type]
    states = [loader.generator.get_state()]
    assert loader._iterator is None
    for _ in range(2):
        made = list(loader), loader._iterator
        assert made[1] is loader._iterator is not None
        states.append(loader.generator.get_state())
    assert not torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])
    plain = DataLoader(range(4))  # type: ignore[arg-type]
    assert iter(plain)._index_sampler is plain._index_sampler is plain.batch_sampler
    with mock.patch.object(plain, "_get_iterator") as made_by:
        assert iter(plain) is made_by.return_value
    assert plain._iterator is None


@pytest.mark.seam("DataLoaders keep their order, unless a fit was begun in Lightning's")
@pytest.mark.parametrize("shuffle", [False, True])
def test_lightning_prepares_every_loader_by_one_method(shuffle: bool) -> None:
    """_process_dataloader calls _prepare_dataloader of Trainer._data_connector, and shuffles all training loaders if
    _accelerator_connector.use_distributed_sampler; _is_dataloader_shuffled returns what the user has passed.
    """
    trainer = pl.Trainer(accelerator="cpu", strategy="ddp", devices=1, logger=False, enable_checkpointing=False)
    own = DataLoader(range(4), shuffle=shuffle)  # type: ignore[arg-type]

    def sampler(stage: RunningStage = RunningStage.TRAINING) -> Any:
        loader: Any = _process_dataloader(trainer, TrainerFn.FITTING, stage, own)
        return loader.sampler

    assert isinstance(sampler(), DistributedSampler) and sampler().shuffle
    loader_order.keep_order(trainer, lambda: True, is_single=False)
    assert isinstance(sampler(), DistributedSampler) and sampler().shuffle == shuffle
    loader_order.keep_order(trainer, lambda: True, is_single=True)
    assert sampler() is sampler(RunningStage.VALIDATING) is own.sampler
    loader_order.keep_order(trainer, lambda: False, is_single=True)
    with pytest.warns(UserWarning, match="every training DataLoader") as told:
        assert sampler().shuffle
        sampler(RunningStage.VALIDATING)
    assert sum("every validation DataLoader" in str(each.message) for each in told) == shuffle


def quiet() -> pl.Trainer:
    """Return a Trainer of one epoch of three batches."""
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    return pl.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=3, limit_val_batches=0, **off)


@pytest.mark.seam("going on after a batch")
def test_a_loop_calls_what_we_replace() -> None:
    """_TrainingEpochLoop.run calls on_run_start once, on_advance_end after each batch, and has _Loop._restarting."""
    trainer, calls = quiet(), []
    loop = trainer.fit_loop.epoch_loop
    for name in ("on_run_start", "on_advance_end"):

        def call(fetcher: object, name: str = name) -> None:
            calls.append(name)
            getattr(type(loop), name)(loop, fetcher)

        setattr(loop, name, call)
    trainer.fit(BoringModel())
    assert calls == ["on_run_start", "on_advance_end", "on_advance_end", "on_advance_end"]
    assert trainer.fit_loop._restarting is False and loop.restarting is False


@pytest.mark.seam("``storage-or-new``: a fit loads what is newest, or nothing")
def test_a_run_loads_a_checkpoint_by_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer._checkpoint_connector.resume_start gets the user's path; without one it loads nothing (_ckpt_path)."""
    trainer, given = quiet(), []
    connector = trainer._checkpoint_connector
    begin = type(connector).resume_start

    def begin_without(checkpoint_path: object = None, **options: object) -> None:
        given.append((checkpoint_path, {*options}))
        begin(connector, None, **options)

    monkeypatch.setattr(connector, "resume_start", begin_without)
    trainer.fit(BoringModel(), ckpt_path="storage-or-new")
    assert given == [("storage-or-new", {"weights_only"})] and trainer.ckpt_path is None and trainer.global_step == 3


@pytest.mark.seam("``storage-or-new``: what Lightning saves when SLURM requeues the job is a checkpoint, too")
def test_the_name_of_a_checkpoint_on_slurm(tmp_path: Path) -> None:
    """Trainer._checkpoint_connector.hpc_save_path returns a path that is named hpc_ckpt_N.ckpt, with a number N."""
    assert quiet()._checkpoint_connector.hpc_save_path(tmp_path) == str(tmp_path / f"{_SAVED_ON_SLURM}1.ckpt")


@pytest.mark.seam("training records", "Callbacks see Trainer._logger_connector._callback_metrics.")
def test_a_checkpoint_without_weights() -> None:
    """dump_checkpoint of Trainer._checkpoint_connector calls _get_lightning_module_state_dict, on_save_checkpoint."""
    trainer = quiet()
    trainer.fit(BoringModel())
    with (
        replaced(trainer._checkpoint_connector, "_get_lightning_module_state_dict", dict),
        replaced(trainer.fit_loop, "on_save_checkpoint", lambda: {"asked": True}),
    ):
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert checkpoint["state_dict"] == {} and checkpoint["loops"]["fit_loop"]["state_dict"] == {"asked": True}
    trainer._logger_connector._callback_metrics.update({"x": torch.ones(())})
    assert "x" in trainer.callback_metrics


@pytest.mark.seam(
    "a resume finds complete checkpoints",
    "There are _should_skip_saving_checkpoint, _should_remove_checkpoint and _remove_checkpoint.",
)
def test_the_index_of_a_model_checkpoint() -> None:
    """ModelCheckpoint.state_dict has the index; _last_checkpoint_saved and _last_global_step_saved are attributes."""
    callback = ModelCheckpoint()
    assert {*callback.state_dict()} == {*_FIELDS, "monitor", "dirpath"}
    assert all(callback.state_dict()[name] is getattr(callback, name) for name in _FIELDS)
    assert (callback._last_checkpoint_saved, callback._last_global_step_saved) == ("", 0)
    assert passed(callback._should_skip_saving_checkpoint) == ["trainer"]
    assert passed(callback._should_remove_checkpoint) == ["trainer", "previous", "current"]
    assert passed(callback._remove_checkpoint) == ["trainer", "filepath"]
    assert "trainer.strategy.remove_checkpoint(filepath)" in inspect.getsource(ModelCheckpoint._remove_checkpoint)


# ---- the private parts of Lightning and torch by which trainings of several ranks end


@pytest.mark.seam("tell the searches of a Tuner from fits")
def test_a_tuner_marks_its_finders() -> None:
    """LearningRateFinder and BatchSizeFinder have _early_exit, which the Tuner alone sets."""
    assert not LearningRateFinder()._early_exit and not BatchSizeFinder()._early_exit
    assert inspect.getsource(tuning).count("._early_exit = True") == 2


@pytest.mark.seam("the watch reports SIGTERM to all ranks, without a collective")
def test_the_connector_looks_up_its_handler_of_sigterm_on_itself(tmp_path: Path) -> None:
    """Trainer._signal_connector looks _sigterm_notifier_fn up on the instance when it registers handlers."""
    connector: Any = quiet_trainer(tmp_path, "auto")._signal_connector
    connector._sigterm_notifier_fn = mock.Mock()
    before = signal.getsignal(signal.SIGTERM)
    try:
        connector.register_signal_handlers()
        signal.raise_signal(signal.SIGTERM)
    finally:
        connector.teardown()
        signal.signal(signal.SIGTERM, before)
    connector._sigterm_notifier_fn.assert_called_once()


@pytest.mark.seam("`end_by` raises an error that names the lost rank instead of a collective's")
@pytest.mark.seam(
    "`SavesAfterError` keeps a rank that fails alone from saving",
    "`Callback.on_exception` runs before it, while the error is handled and the status is `TrainerStatus.INTERRUPTED`. "
    '`Trainer.save_checkpoint` ends with `Strategy.barrier("Trainer.save_checkpoint")`.',
)
def test_an_error_ends_in_teardown_after_on_exception(tmp_path: Path) -> None:
    """Strategy.on_exception may replace an error, before Trainer._teardown ends signals, loops and strategy."""
    trainer, calls = quiet_trainer(tmp_path, "auto"), mock.Mock()

    def save(*_: Any) -> None:
        calls.callback(trainer.state.status, sys.exc_info()[1])
        trainer.save_checkpoint(tmp_path / "saved.ckpt")

    def on_exception(exception: BaseException) -> None:
        assert str(exception) == "theirs"
        trainer._teardown()
        calls.torn()
        raise KeyError("ours") from exception

    trainer.callbacks.append(does(on_exception=save))  # type: ignore[attr-defined]
    trainer.strategy.on_exception = on_exception  # type: ignore[method-assign]
    trainer.strategy.barrier = calls.barrier  # type: ignore[method-assign]
    error, module = ValueError("theirs"), LitTiny(Recipe())
    module.on_train_start = mock.Mock(side_effect=error)  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="ours"):
        trainer.fit(module)
    handled, saved = mock.call.callback(TrainerStatus.INTERRUPTED, error), mock.call.barrier("Trainer.save_checkpoint")
    assert calls.mock_calls[-3:] == [handled, saved, mock.call.torn()]


@pytest.mark.seam("all ranks end after the same batch")
def test_ranks_learn_at_the_start_of_a_batch_what_rank_0_received(tmp_path: Path) -> None:
    """_TrainingEpochLoop._broadcast_sigterm_tensor sends rank 0's received_sigterm, and raises SIGTERMException."""
    assert on_ranks(ended_in_the_second_batch, tmp_path) == [[0, 1], [0, 1]]


def ended_in_the_second_batch(folder: Path) -> list[int]:
    """Ask rank 0 to end in the second batch, by the attribute that its signal handler sets; return what was begun."""
    trainer = quiet_trainer(folder, "ddp", devices=2, precision="32-true", max_steps=10)
    loop: Any = trainer.fit_loop.epoch_loop
    calls = []

    def broadcast() -> None:
        calls.append(trainer.global_step)
        if trainer.global_rank == 0 and trainer.global_step == 1:
            trainer._signal_connector.received_sigterm = True
        type(loop)._broadcast_sigterm_tensor(loop)

    loop._broadcast_sigterm_tensor = broadcast
    with pytest.raises(SIGTERMException):
        trainer.fit(LitTiny(Recipe()))
    return calls


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "gather": lambda one: dist.all_gather_into_tensor(one.new_empty(2), one, async_op=True).wait(),
    "reduction": dist.all_reduce,
    "broadcast": lambda one: dist.broadcast(one, 0),
    "barrier": lambda _: dist.barrier(),
}


@pytest.mark.seam("where a rank waits for others, and whether for the same collective, without an exchange")
@pytest.mark.seam("`lost_rank_behind` recognises a collective that misses a rank", "The error of gloo names it.")
def test_every_collective_waits_and_counts(tmp_path: Path) -> None:
    """Torch, Lightning and DeepSpeed wait for collectives by torch.distributed.Work.wait; Work._get_op_type is a
    torch._C._distributed_c10d.OpType, and groups of distributed_c10d._world.pg_map count:
    ProcessGroup._get_sequence_number_for_group. A collective that misses a rank raises a plain RuntimeError.
    """
    (kinds, counted, error), _ = on_ranks(waited_for, tmp_path)
    assert (kinds, counted) == (list(COLLECTIVES), len(COLLECTIVES))
    assert error is True, "the error of a collective that misses a rank is another one"


def reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


def waited_for(_: Path) -> tuple[list[str], int, bool | None]:
    """Run collectives; return those waited for, those counted, and on rank 0 whether a lost rank is told by gloo."""
    dist.init_process_group("gloo")
    dist.new_group()
    kinds: list[str] = []

    def wait(original: Callable[..., bool], work: dist.Work, *args: Any) -> bool:
        kinds.append(_kind_of(work))
        return original(work, *args)

    before = _counts()
    assert len(before) == 2
    with wrapped(dist.Work, "wait", wait):
        for run in COLLECTIVES.values():
            run(torch.ones(1))
    counted = sum(_counts().values()) - sum(before.values())
    if dist.get_rank() == 1:
        return kinds, counted, None
    with pytest.raises(RuntimeError) as caught:
        reduce_for_ever()  # rank 1 ends now
    return kinds, counted, _is_of_collective(caught.value)


@pytest.mark.seam("errors that name them")
@pytest.mark.parametrize("name", ["AllGatherHandle", "AllGatherCoalescedHandle"])
def test_handles_of_gathers_hold_their_parameters(name: str) -> None:
    """Attributes of DeepSpeed's handles of gathers, and locals of its functions, hold parameters and modules."""
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_status = partition_parameters.ZeroParamStatus.INFLIGHT  # type: ignore[attr-defined]
    arguments = {"handle": None, "param": param, "allgather_handle": None, "params": [param], "partitions": []}
    kind = getattr(partition_parameters, name)
    taken = [one.name for one in inspect.signature(kind).parameters.values() if one.default is one.empty]
    assert param in set(_params_in(kind(**{argument: arguments.get(argument) for argument in taken})))


@pytest.mark.seam("ranks that generate texts of different lengths")
def test_generate_asks_a_mark_of_the_model() -> None:
    """GenerationMixin.generate takes synced_gpus from is_fsdp_managed_module, by a model's _is_fsdp_managed_module."""
    assert inspect.signature(GenerationMixin.generate).parameters["synced_gpus"].default is None
    assert "is_fsdp_managed_module(self)" in inspect.getsource(sys.modules[GenerationMixin.__module__])
    module: Any = torch.nn.Linear(1, 1)
    assert not is_fsdp_managed_module(module)
    setattr(module, module_copies._MARK, True)
    assert is_fsdp_managed_module(module)


# ---- checkpoints of DeepSpeed and torch, also universal ones


@pytest.mark.seam("SmartInfinityEngine, put_common_in_place: failures reach all ranks, a dead disk is given up")
def test_deepspeed_writes_these_files_beside_the_subfolder(tmp_path: Path) -> None:
    """DeepSpeedEngine._copy_recovery_script; save_checkpoint writes only ``latest``, unless ``save_latest=False``."""
    engine = SimpleNamespace(_change_recovery_script_permissions=lambda _: None)
    DeepSpeedEngine._copy_recovery_script(engine, str(tmp_path))
    scripts = {file.name for file in tmp_path.iterdir()}
    assert scripts == set(FILES_BESIDE) - {LATEST}, "a folder of such a name would not be refused before a save"
    source = inspect.getsource(DeepSpeedEngine.save_checkpoint)
    assert source.count("open(") == 1 and f"'{LATEST}'" in source, "a dead disk would keep a save for ever"


@pytest.mark.seam("put_save_in_place replaces DeepSpeed's files and keeps the user's")
def test_names_of_deepspeeds_files_have_the_rank_of_the_model(tmp_path: Path) -> None:
    """_get_rank_zero_ckpt_name, _get_zero_ckpt_prefix and _get_ckpt_name recognise DeepSpeed's files."""
    engine = SimpleNamespace(
        checkpoint_mp_rank=0,
        zero_optimization_partition_weights=lambda: True,
        optimizer=SimpleNamespace(dp_process_group=None),
        _get_zero_ckpt_prefix=partial(DeepSpeedEngine._get_zero_ckpt_prefix, None),
    )
    names = [
        DeepSpeedEngine._get_rank_zero_ckpt_name(engine, "folder", "tag", 0, 7, bf16_mode)
        for bf16_mode in (True, False)
    ]
    names.append(DeepSpeedEngine._get_ckpt_name(engine, "folder", "tag", pp_placeholder="7"))
    for name in names:
        assert any(fnmatch(Path(name).name, pattern) for pattern in staged_save.OF_DEEPSPEED), name


@pytest.mark.seam("save_in_turn, SmartInfinityStrategy: training goes on before its checkpoints are complete")
def test_model_checkpoint_looks_at_its_checkpoints_in_these_methods_only() -> None:
    """ModelCheckpoint uses no more than _save_checkpoint, file_exists, _link_checkpoint, Strategy.remove_checkpoint."""
    saving = [name for name in vars(ModelCheckpoint) if name.startswith(("_save", "_update", "_get_metric"))]
    assert "_save_checkpoint" in saving and "_save_last_checkpoint" in saving
    looks = ("self._fs", "os.path.exists", "shutil", ".is_file(", "os.remove")
    assert [name for name in saving if lacking(getattr(ModelCheckpoint, name), *looks) != [*looks]] == []
    for method, call in {
        ModelCheckpoint._save_last_checkpoint: "self._link_checkpoint(",
        ModelCheckpoint._remove_checkpoint: "trainer.strategy.remove_checkpoint(",
        ModelCheckpoint.file_exists: "self._fs.exists(",
    }.items():
        assert lacking(method, call) == []


@pytest.mark.seam("a file may be larger than memory; we leave room in a file and fill it later")
def test_torch_maps_files_by_this_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.load(mmap=True) maps a file by torch.UntypedStorage.from_file(path, shared, nbytes).

    skip_data(materialize_fake_tensors=True) saves no data; UntypedStorage._checkpoint_offset has its place.
    """
    assert "materialize_fake_tensors" in inspect.signature(torch.serialization.skip_data.__init__).parameters
    assert hasattr(torch.UntypedStorage, "_checkpoint_offset")
    calls: list[tuple[Any, ...]] = []
    original = torch.UntypedStorage.from_file
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *given: (calls.append(given), original(*given))[1])
    torch.save({"a": torch.arange(4)}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", mmap=True)["a"].tolist() == [0, 1, 2, 3]
    assert calls == [(str(tmp_path / "file.pt"), False, (tmp_path / "file.pt").stat().st_size)]


@pytest.mark.seam("`_Places` changes nothing, and takes no more memory or time than a file's content deserves")
@pytest.mark.parametrize(
    "pickled",
    [
        b"Nr\xff\xff\xff\x01.",  # puts into place 2^25 of the memo
        b"\x96\0\0\0\x10\0\0\0\0.",  # 256 MiB of bytes that do not follow
        b"ctorch._utils\n_rebuild_tensor_v2\n}X\1\0\0\0aNsb.",  # sets an attribute
    ],
    ids=["memo", "bytes", "attribute"],
)
def test_python_looks_up_how_it_reads_a_pickle(pickled: bytes) -> None:
    """pickle._Unpickler calls the functions in `dispatch` of its class, and has its memo in a dictionary."""
    tracemalloc.start()
    with suppress(KeyError):
        whole_file._Places(io.BytesIO(pickled), folder="").load()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and not vars(whole_file._place_of)
    assert whole_file._place_of((mock.Mock(), 1), 0, (1,) * 65, (1,) * 65) is None


SHAPES = [OrderedDict(a=torch.Size([3]), b=torch.Size([2, 2])), OrderedDict(c=torch.Size([1]))]
WHOLE = {"a": torch.arange(3.0), "b": 10 + torch.arange(4.0), "c": torch.tensor([20.0])}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, with numbered sub-groups and slices padded to one length."""
    return save_of_two(tmp_path_factory.mktemp("two") / "two.ckpt", SHAPES, WHOLE, {"exp_avg": 100, "exp_avg_sq": 200})


@pytest.fixture(scope="module")
def universal(checkpoint: Path) -> Path:
    """The universal checkpoint that DeepSpeed's converter makes of it."""
    return convert(checkpoint)


@pytest.mark.seam("convert_checkpoint writes them for optimizers that the converter does not know")
def test_ours_makes_the_same(checkpoint: Path, universal: Path, tmp_path: Path) -> None:
    """``smart-infinity universal`` writes the files and keys that DeepSpeed's converter writes, and checksums."""
    ours = convert_by_command(checkpoint, tmp_path / "ours")
    assert_same_tensors(ours, universal)
    files = [{str(file.relative_to(folder)) for file in folder.rglob("*.pt")} for folder in (ours, universal)]
    assert files[0] == files[1] | {"zero/crc32c.pt"}
    states = [torch.load(folder / "zero/optimizer_state.pt", weights_only=False) for folder in (ours, universal)]
    assert states[0].keys() == states[1].keys() | {CHECKSUMMED}
    assert states[0]["param_groups"] == states[1]["param_groups"]
    kept = [[{*group} for group in state["optimizer_state_dict"]["state"].values()] for state in states]
    assert kept[0] == kept[1]


@pytest.mark.seam("`write_arrays` saves what it reads")
def test_converter_makes_flat_tensors_of_what_our_checkpoints_hold(universal: Path) -> None:
    """ds_to_universal writes one file per parameter and array, without padding."""
    expected = {
        f"{name}/{array}": (torch.float32, (values + offset).tolist())
        for name, values in WHOLE.items()
        for array, offset in {"fp32": 0, "exp_avg": 100, "exp_avg_sq": 200}.items()
    }
    assert {name: (values.dtype, values.flatten().tolist()) for name, values in tensors(universal).items()} == expected


@pytest.mark.seam("`UniversalFolder` reads universal checkpoints")
def test_converter_keeps_the_states_that_are_read(universal: Path) -> None:
    """deepspeed.checkpoint.ds_to_universal keeps the first rank's optimizer state and every rank's model states."""
    state = torch.load(universal / "zero" / "optimizer_state.pt", weights_only=False)
    assert (state["ours"], state["optimizer_state_dict"]["param_groups"][0]["lr"]) == (0, 0.5)
    assert int(state["optimizer_state_dict"]["state"][0]["step"]) == 7
    for rank in range(2):
        states = torch.load(universal / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", weights_only=False)
        assert (states["of_user"], states["param_shapes"]) == (rank, SHAPES)


@pytest.mark.seam("comparing a checkpoint of another number of processes with the model")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_get_zero_param_shapes", ["self"]),
        ("_get_zero_frozen_param_attributes", ["self", "attr_func"]),
        ("_get_param_shape_func", ["self", "param"]),
    ],
)
def test_engine_describes_its_parameters(name: str, parameters: list[str]) -> None:
    """DeepSpeedEngine: _get_zero_param_shapes, _get_zero_frozen_param_attributes, _get_param_shape_func."""
    assert list(inspect.signature(getattr(DeepSpeedEngine, name)).parameters) == parameters


@pytest.mark.seam("load_resharded and load_saved_weights load buffers and frozen parameters")
def test_engine_loads_buffers_and_frozen_fragments() -> None:
    """DeepSpeedEngine.load_module_state_dict loads all contents of a checkpoint except masters and moments."""
    module = torch.nn.BatchNorm1d(2)
    weight: Any = module.weight
    weight.requires_grad_(False)
    weight.ds_id, weight.ds_tensor = 0, torch.zeros(2)
    engine = mock.MagicMock(module=module, param_names={weight: "weight"})
    saved = {**module.state_dict(), "running_mean": torch.tensor([3.0, 4.0])}

    read = mock.MagicMock(spec=["__getitem__"])
    read.__getitem__.side_effect = {"weight": torch.tensor([5.0, 6.0])}.__getitem__
    checkpoint = {"module": saved, "frozen_param_fragments": read}
    DeepSpeedEngine.load_module_state_dict(engine, checkpoint=checkpoint, strict=True)
    assert module.running_mean is not None and module.running_mean.tolist() == [3.0, 4.0]
    assert weight.ds_tensor.tolist() == [5.0, 6.0], "load/resharding.py hands frozen slices over so"

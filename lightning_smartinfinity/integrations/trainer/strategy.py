"""``Trainer(strategy="smart_infinity")``: ZeRO-3 whose optimizer state is kept on storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.integrations.lightning_options import (
    SharedOptions,
    indexed_device,
    swapped_precision,
    take_options,
)
from lightning_smartinfinity.integrations.precision import SmartInfinityPrecision
from lightning_smartinfinity.integrations.session import TrainingSession
from lightning_smartinfinity.integrations.trainer import shutdown
from lightning_smartinfinity.integrations.trainer.callback_support import (
    accumulates,
    adapt_callbacks,
    admit_batch_size_search,
    averages_weights,
    configured_optimizer,
    copy_around_training,
    is_trial,
    synchronize_layers,
    warn_of_changed_weights,
)
from lightning_smartinfinity.integrations.trainer.checkpoint_index import CheckpointIndex
from lightning_smartinfinity.integrations.trainer.fit_record import RESUMED_FROM, TrainerFitRecord
from lightning_smartinfinity.integrations.trainer.loader_order import keep_order
from lightning_smartinfinity.integrations.trainer.model_checkpoint import (
    check_folders,
    save_after_errors_together,
    save_beside_training,
    save_in_turn,
)
from lightning_smartinfinity.native import take_back_ask_to_end
from lightning_smartinfinity.planning.automatic_strategy import Surroundings
from lightning_smartinfinity.resume.loader_position import keeping_position
from lightning_smartinfinity.resume.loops import passed_to_run
from lightning_smartinfinity.resume.random_states import capture
from lightning_smartinfinity.resume.schedules import prepare_loads, warn_of_other_number
from lightning_smartinfinity.settings import (
    ActivationOffload,
    GradientCodec,
    PlanConfig,
    SmartSSDConfig,
    TransferConfig,
)
from lightning_smartinfinity.settings.options import OF_TRAINER
from lightning_smartinfinity.settings.strategy import check_save_path, data_types, documents_settings
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.ranks.watchdog import awaiting_ranks, saving
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine

__all__ = ["SmartInfinityStrategy"]


# Hooks between backward and step: of modules and callbacks, and of modules only.
_BEFORE_STEP = ("on_after_backward", "on_before_optimizer_step")
_OF_STEP = ("configure_gradient_clipping", "optimizer_step")


class LightningOptions(SharedOptions, total=False):
    """Settings that Lightning's own strategies accept, passed on unchanged."""

    accelerator: Accelerator | None
    cluster_environment: ClusterEnvironment | None
    precision_plugin: Precision | None


@documents_settings
class SmartInfinityStrategy(TrainingSession, shutdown.EndsEvaluations, DeepSpeedStrategy):
    """Trains models whose optimizer state does not fit in memory.

    ZeRO-3 partitions the parameters. Master weights and optimizer state are kept on storage. Every step streams them
    through a ring of buffers of fixed size, updates them there and writes them back. What free host memory holds is
    not read again.

    Args:
        **options: Settings of Lightning's ``DeepSpeedStrategy`` under the same names (:class:`LightningOptions`).

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
        UnsupportedError: A setting asks for something that the strategy does not support.

    Example::

        Trainer(strategy="smart_infinity", precision="bf16-mixed")
        Trainer(strategy=SmartInfinityStrategy(storage=["/mnt/nvme0", "/mnt/nvme1"]))
    """

    strategy_name = "smart_infinity"
    _fit_record: TrainerFitRecord

    def __init__(
        self,
        storage: str | Path | Sequence[str | Path] | None = None,
        *,
        update_device: str = "auto",
        smartssd: SmartSSDConfig | Mapping[str, Any] | None = None,
        state_format: str = "fp32",
        overlap: str = "auto",
        compression: GradientCodec | None = None,
        activations: ActivationOffload | Mapping[str, Any] | None = None,
        transfer: TransferConfig | Mapping[str, Any] | None = None,
        zero: Mapping[str, Any] | None = None,
        plan: PlanConfig | Mapping[str, Any] | str | None = None,
        watchdog_timeout: float | None = 30.0,
        collective_timeout: float | None = 1500.0,
        **options: Unpack[LightningOptions],
    ) -> None:
        # DeepSpeedStrategy's own constructor is skipped: see take_options.
        super(DeepSpeedStrategy, self).__init__(
            accelerator=options.get("accelerator"),
            parallel_devices=options.get("parallel_devices"),
            cluster_environment=options.get("cluster_environment"),
            precision_plugin=options.get("precision_plugin"),
            process_group_backend=options.get("process_group_backend"),
        )
        self._take_settings(locals())
        self.config = self._engine_config
        take_options(self, options, known=LightningOptions, remedies=OF_TRAINER)
        self._fit_record = TrainerFitRecord()
        self._saves_after_error = shutdown.SavesAfterError()
        self._end_search = admit_batch_size_search(self)
        self._checkpoint_index: CheckpointIndex | None = None
        self._may_bind = False

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    @override
    def root_device(self) -> torch.device:
        return indexed_device(super().root_device, self.local_rank)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = swapped_precision(
            precision_plugin, stock=DeepSpeedPrecision, own=SmartInfinityPrecision, entry="Trainer"
        )

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        # Lightning's own loop decides when an accumulation window ends, as with plain torch; the last window of an
        # epoch may be incomplete. DeepSpeed would count across epochs, and divide the loss by the window a second time.
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        # ZeRO-3 reduces the gradients of every micro-batch: no rank has room for whole gradients.
        yield

    def _has_fp32_in_memory(self, model: torch.nn.Module) -> bool:
        return "mixed" in self.precision_plugin.precision

    @override
    def close(self) -> None:
        super().close()
        self._end_search()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._fit_record.was_interrupted = False
        self._saves_after_error = shutdown.SavesAfterError()

    @override
    def setup_environment(self) -> None:
        self._prepare_environment(super().root_device, local_world_size=self.num_processes)
        if self.lightning_module is not None:
            adapt_callbacks(self.lightning_module.trainer)
            save_after_errors_together(self.lightning_module.trainer)
            copy_around_training(self.lightning_module.trainer)
            is_single = self.num_nodes * self.num_processes == 1
            keep_order(self.lightning_module.trainer, self._fit_record.keeps_order, is_single=is_single)
        # DeepSpeedStrategy's own version refuses every accelerator but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        with awaiting_ranks():
            if self.root_device.type == "cuda":
                super().setup_distributed()
                return
            # DeepSpeedStrategy's own version first validates GPU indices, and a CPU has none.
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._choose_storage(trainer.default_root_dir)
        check_folders(trainer)
        self._saves_after_error.begin_run(trainer)
        self._plan_fit()
        self._fit_record.begin_run(trainer, self._settings, settle=self._settle_earlier)
        self._is_trial = is_trial(trainer)
        if trainer.state.fn is TrainerFn.FITTING and self.model is not None:
            self.model = synchronize_layers(
                self.model, self._layer_sync, device=self.root_device, ranks=self.world_size
            )
        super().setup(trainer)
        shutdown.end_together_after_sigterm(trainer)
        self._checkpoint_index = (
            None if self._rank_state is None else CheckpointIndex(trainer, self._rank_state.background)
        )
        self._fit_record.watch(trainer, self._checkpoint_index)
        self._may_bind = not _may_change_steps(trainer)
        if self._training_engine is not None and self._checkpoint_index is not None:
            save_beside_training(
                trainer,
                self._training_engine.saves,
                self._checkpoint_index,
                finish=self._finish_saves,
                record=self._fit_record.record_index,
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        return keeping_position(loader) if self.lightning_module.trainer.training else loader

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._fit_record.persist()  # a validation may be longer than an interval
        return super().validation_step(*args, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        shutdown.abandon_soon_after_sigterm()
        assert self._training_engine is not None
        self._fit_record.begin_fit(self._trainer, self._training_engine, self._settings_of_state.transfer)
        if averages_weights(self._trainer):
            self._training_engine.optimizer.outside_writes.unrecorded = "no record holds the average of WeightAveraging"

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        assert self.lightning_module is not None
        self._choose_storage(self.lightning_module.trainer.default_root_dir)
        self._plan_fit()
        with self._building(super().model_sharded_context, self.lightning_module):
            yield

    def _plan_fit(self) -> None:
        if self._trainer.state.fn is TrainerFn.FITTING:
            around = Surroundings(
                precision=self.precision_plugin.precision,
                accumulate=max(self._trainer.accumulate_grad_batches, 1 + accumulates(self._trainer)),
                processes=self.num_processes,
                nodes=self.num_nodes,
                on_gpu=self._on_cuda,
                tell=rank_zero_info,
            )
            self._plan(self.lightning_module, around)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        optimizer, module = self._training_optimizer, self.lightning_module
        if optimizer is not None and module is not None:
            # In automatic optimization Lightning's loop knows whether a step follows. A manual loop may do anything in
            # between.
            accumulates = module.trainer.fit_loop._should_accumulate()
            optimizer.step_follows = module.automatic_optimization and not accumulates
            optimizer.may_bind = self._may_bind

    @override
    def on_train_end(self) -> None:
        self.drain()
        self._finish_saves()
        super().on_train_end()
        self._fit_record.note_end()

    def _finish_saves(self) -> None:
        assert self._training_engine is not None
        with saving():
            self._training_engine.saves.finish()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._training_engine is None:
            super().remove_checkpoint(filepath)
        else:
            self._training_engine.saves.remove(filepath, partial(self.checkpoint_io.remove_checkpoint, filepath))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # DeepSpeed saves the state, rank by rank. Lightning would put it into a dictionary that save_checkpoint
        # discards.
        return {}

    def may_save(self) -> bool:
        """Return whether a checkpoint may be saved now: while callbacks handle an error, only if all ranks do.

        The first call after an error is collective.
        """
        module = self.lightning_module
        if module is None or module.trainer.state.status is not TrainerStatus.INTERRUPTED:
            return True
        if self._fit_record.was_interrupted:  # the callbacks have handled it
            return True
        return self._training_engine is not None and self._saves_after_error.allowed(module.trainer)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if args[:1] != ("Trainer.save_checkpoint",) or self.may_save():
            super().barrier(*args, **kwargs)

    @override
    def save_checkpoint(self, checkpoint: ClientState, filepath: str | Path, storage_options: Any = None) -> None:
        if not self.may_save():
            return
        check_save_path(filepath)
        if storage_options is not None:
            raise UnsupportedError(
                f"save_checkpoint(storage_options={storage_options!r}) does not work with the smart_infinity strategy.",
                "Leave it out: a checkpoint is a folder of this machine's file system.",
            )
        if self._training_engine is None:
            raise UnsupportedError(
                "save_checkpoint was called on a Trainer that has trained nothing.",
                "Call it during or after fit; what was evaluated is in the checkpoint that it came from.",
            )
        if self.lightning_module is not None:
            excludes_frozen = self.exclude_frozen_parameters
            warn_of_changed_weights(self.lightning_module, checkpoint, excludes_frozen=excludes_frozen)
        present, optimizer = self.model, self._training_optimizer
        self.model = self._training_engine
        try:
            if optimizer is not None:
                # With save_weights_only=True Lightning leaves out the optimizer states.
                optimizer.saves_weights_only = "optimizer_states" not in checkpoint
            with saving():
                # After SIGTERM, drain raises within seconds if the storage does not answer. If it answers, the
                # checkpoint's requests get the usual time limit again.
                self.drain()
                take_back_ask_to_end()
                self._fit_record.add_point(checkpoint, capture(self.root_device, world_size=self.world_size))
                super().save_checkpoint(checkpoint, filepath, storage_options)
        except Exception as error:
            self._saves_after_error.note_failed_save(self._trainer, error)
            raise
        finally:
            self.model = present
            if optimizer is not None:
                optimizer.saves_weights_only = False

    @override
    def _module_to_save(self, module: torch.nn.Module | None) -> torch.nn.Module:
        whole = self.lightning_module if module is None else module
        if whole is None:
            raise UnsupportedError(
                "save_pretrained was called on a Trainer that has run nothing.",
                "Call it during or after a fit or an evaluation.",
            )
        return whole

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> ClientState:
        from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
        from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import await_seen
        from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy
        from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import load_verified
        from lightning_smartinfinity.zero3.checkpoints.load.full_weights import full_state_dict
        from lightning_smartinfinity.zero3.engine.load_save import load_engine
        from lightning_smartinfinity.zero3.engine.portable import PortableEngine
        from lightning_smartinfinity.zero3.ranks.collectives import raising_together

        assert self.lightning_module is not None
        trainer = self._trainer
        doing = trainer.state.fn
        if self._fit_record.resumes:
            assert self._training_engine is not None
            return self._fit_record.restore_fit(trainer, self._training_engine)
        if weights_only is None:
            weights_only = passed_to_run(trainer, "weights_only")
        consent = f"weights_only=False to Trainer.{doing.value if doing else 'fit'}"
        with io_limit(self._settings.transfer.io_timeout), loading_policy(weights_only, consent=consent):
            if self.load_full_weights:
                await_seen(checkpoint_path)
                with raising_together(), reading_checkpoint(checkpoint_path):
                    loaded: ClientState = load_verified(super().load_checkpoint, checkpoint_path)
                    full_state_dict(loaded, checkpoint_path)
                return loaded
            assert isinstance(self.model, PortableEngine)
            # DeepSpeedStrategy's own version accepts only folders that Lightning saved.
            client_state = load_engine(
                checkpoint_path,
                self.model,
                with_optimizer=doing == TrainerFn.FITTING,
                strict=self.lightning_module.strict_loading,
                needed=RESUMED_FROM,
            )
        client_state.setdefault(LIGHTNING_KEY, lightning.__version__)  # Lightning reads it before an evaluation, too
        client_state.setdefault("state_dict", self.lightning_module.state_dict())  # for on_load_checkpoint
        self._fit_record.take_point(trainer, client_state)
        return client_state

    @override
    def load_model_state_dict(self, checkpoint: SavedState, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._trainer.state.fn == TrainerFn.FITTING and not self._is_trial:  # then Lightning loads the schedulers
            now, saved, new_settings = (
                self.lr_scheduler_configs,
                checkpoint.get("lr_schedulers"),
                self._own_hyperparameters,
            )
            if saved is not None:
                warn_of_other_number(len(now), len(saved), new_settings=new_settings)
            loaded = zip(now, saved or (), strict=False)
            prepare_loads((config.scheduler for config, _ in loaded), new_settings=new_settings)

    @override
    def _restore_zero_state(self, ckpt: SavedState, strict: bool) -> None:
        from lightning_smartinfinity.zero3.checkpoints.load.full_weights import load_full_weights

        assert self.lightning_module is not None
        optimizer = self._training_optimizer if self.model is self._training_engine else None
        writes = None if optimizer is None else optimizer.outside_writes
        load_full_weights(self.lightning_module, ckpt["state_dict"], writes=writes, strict=strict)

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        from lightning_smartinfinity.zero3.engine.build import build_evaluation_engine, refuse_in_fit

        refuse_in_fit(model)
        self._begin_watch()
        # DeepSpeedStrategy's own version also removes the user's hooks from the module.
        with self._parameters_on_storage(model):
            self.model = build_evaluation_engine(model, self.config, device_index=self.root_device.index)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fit_record.was_interrupted = True
        super().on_exception(exception)
        with suppress(Exception):  # a loader may be what has failed
            self._fit_record.note_end()
        shutdown.end_by(exception, self.lightning_module)

    @override
    def teardown(self) -> None:
        with replaced(self, "_optimizers", []):  # Lightning would move their state, which is on storage
            super().teardown()
        if self.lightning_module is not None:
            save_in_turn(self.lightning_module.trainer)
        completed = not self._fit_record.was_interrupted
        self._become_idle(completed=completed)
        if self._checkpoint_index is not None:
            self._checkpoint_index.roll_back()
            self._checkpoint_index = None
        settings = self._settings_of_state
        self._fit_record.end_fit(settings, self._rank_state, completed=completed, says=self.is_global_zero)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        return configured_optimizer(self.lightning_module)

    @override
    def _setup_model_and_optimizer(
        self, model: torch.nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[SmartInfinityEngine, Optimizer]:
        assert optimizer is not None
        initialize = partial(super()._setup_model_and_optimizer, model, optimizer, lr_scheduler)
        engine, _ = self._build_engine(model, optimizer, initialize)
        engine.optimizer.used_gradients.expects_reset = True
        engine.resumed_from = frozenset(RESUMED_FROM)
        return engine, optimizer

    @override
    def init_deepspeed(self) -> None:
        # DeepSpeedStrategy's own version warns that configure_gradient_clipping does not clip, and refuses clipping by
        # value; here both work.
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.training:
            self._initialize_deepspeed_inference(self.lightning_module)
            return
        several = accumulates(self.lightning_module.trainer)
        self.config["data_types"] = data_types(self._settings.transfer, accumulates=several)
        self._initialize_deepspeed_train(self.lightning_module)
        assert self._rank_state is not None
        self._rank_state.in_fit = True

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        # SmartInfinityPrecision.clip_gradients clips when Lightning or the module asks for it.
        self.config["gradient_clipping"] = 0.0
        # DeepSpeed only prints this number. Lightning would read it from a batch sampler, which may not exist.
        self.config["train_micro_batch_size_per_gpu"] = 1
        super()._format_config()
        # For DeepSpeed every step ends an accumulation window: see handles_gradient_accumulation.
        self.config["gradient_accumulation_steps"] = 1


def _may_change_steps(trainer: pl.Trainer) -> bool:
    """Return whether gradients or hyperparameters may be read or changed between backward and step."""
    module, callbacks = trainer.lightning_module, vars(trainer)["callbacks"]
    own = [is_overridden(hook, module, pl.LightningModule) for hook in (*_BEFORE_STEP, *_OF_STEP)]
    others = [is_overridden(hook, callback, pl.Callback) for hook in _BEFORE_STEP for callback in callbacks]
    return bool(trainer.gradient_clip_val) or any(own) or any(others)

"""``Trainer(strategy="smart_infinity")``: ZeRO-3 whose optimizer state lives only on storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import (
    _init_optimizers_and_lr_schedulers,
    _MockOptimizer,
    do_nothing_closure,
)
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_smartinfinity import ending
from lightning_smartinfinity.checkpoint_hint import LIGHTNING_KEY
from lightning_smartinfinity.compatibility import OptimizerList, accumulates, adapt_callbacks, copy_around_training
from lightning_smartinfinity.compression import GradientCodec
from lightning_smartinfinity.config import SmartSSDConfig, TransferConfig
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.lightning_options import SharedOptions, indexed_device, swapped_precision, take_options
from lightning_smartinfinity.model_checkpoint import save_beside_training, save_in_turn
from lightning_smartinfinity.native import take_back_ask_to_end
from lightning_smartinfinity.near_storage import NearStorage
from lightning_smartinfinity.precision import SmartInfinityPrecision
from lightning_smartinfinity.recorder import (
    STORAGE,
    TrainingRecorder,
    log_how_to_resume,
    require_resumable,
    resume_engine,
    say_if_not_resumable,
)
from lightning_smartinfinity.recording import (
    go_on_after_batch,
    loop_state,
    restore_loop,
    watch_steps,
)
from lightning_smartinfinity.resume.loader_position import keeping_position
from lightning_smartinfinity.resume.loops import (
    begin_first_epoch,
    continue_epoch,
    load_loader_states,
    load_only_own_states,
    passed_to_run,
    without_positions,
)
from lightning_smartinfinity.rng import RNG_KEY, capture, fits, restore
from lightning_smartinfinity.settings import check_save_path, documents_settings, given_settings
from lightning_smartinfinity.stock_options import OF_TRAINER
from lightning_smartinfinity.store.in_time import io_limit
from lightning_smartinfinity.update_rules import optimizer_names
from lightning_smartinfinity.watching import saving
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import SmartInfinityEngine

__all__ = ["SmartInfinityStrategy"]


_HOW_TO_RESUME = "run it again with trainer.fit(..., ckpt_path='storage')"
_RESUMED_FROM = (LIGHTNING_KEY, "loops", "lr_schedulers")


class LightningOptions(SharedOptions, total=False):
    """Settings that Lightning's own strategies take, passed on unchanged."""

    accelerator: Accelerator | None
    cluster_environment: ClusterEnvironment | None
    precision_plugin: Precision | None


@documents_settings
class SmartInfinityStrategy(NearStorage, DeepSpeedStrategy):
    """Trains models whose optimizer state does not fit in memory.

    ZeRO-3 partitions the parameters. Master weights and optimizer state lie only on storage: every step streams
    them through a ring of buffers of fixed size, in which they are updated.

    Args:
        **options: Settings that Lightning's ``DeepSpeedStrategy`` takes by the same names (:class:`LightningOptions`).

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
        UnsupportedError: A setting asks for something that the strategy does not support.

    Example::

        Trainer(strategy="smart_infinity", precision="bf16-mixed")
        Trainer(strategy=SmartInfinityStrategy(storage=["/mnt/nvme0", "/mnt/nvme1"]))
    """

    strategy_name = "smart_infinity"
    _records = True

    def __init__(
        self,
        storage: str | Path | Sequence[str | Path] | None = None,
        *,
        update_device: str = "auto",
        smartssd: SmartSSDConfig | Mapping[str, Any] | None = None,
        state_format: str = "fp32",
        overlap: str = "auto",
        compression: GradientCodec | None = None,
        activations: object | None = None,
        transfer: TransferConfig | Mapping[str, Any] | None = None,
        zero: Mapping[str, Any] | None = None,
        watchdog_timeout: float | None = 30.0,
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
        settings = given_settings(
            type(self).__name__,
            storage=storage,
            update_device=update_device,
            smartssd=smartssd,
            state_format=state_format,
            overlap=overlap,
            compression=compression,
            activations=activations,
            transfer=transfer,
            zero=zero,
            watchdog_timeout=watchdog_timeout,
        )
        self._take_settings(settings)
        self.config = self._engine_config
        take_options(self, options, known=LightningOptions, answers=OF_TRAINER)
        self._random_state: dict[str, Any] | None = None
        self._recorder: TrainingRecorder | None = None
        self._goes_on_after_batch = False
        self._was_interrupted = False

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
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DeepSpeedStrategy.optimizers.fset(self, OptimizerList(optimizers))  # type: ignore[attr-defined]

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        # Lightning's own loop decides when an accumulation window ends, as with plain torch; an epoch may end with an
        # incomplete one. DeepSpeed would count across epochs, and divide the loss by the window a second time.
        return False

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        # ZeRO-3 reduces the gradients of every micro-batch: no rank has room for whole gradients.
        yield

    @override
    def setup_environment(self) -> None:
        self._prepare_environment(super().root_device, local_world_size=self.num_processes)
        if self.lightning_module is not None:
            adapt_callbacks(self.lightning_module.trainer)
            copy_around_training(self.lightning_module.trainer)
        # DeepSpeedStrategy's own version refuses every accelerator but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
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
        self._random_state, self._recorder = None, None
        self._goes_on_after_batch = self._was_interrupted = False
        self._resumes = trainer.state.fn == TrainerFn.FITTING and passed_to_run(trainer, "ckpt_path") == STORAGE
        if self._resumes:
            require_resumable(self._settings.transfer, what="fit(ckpt_path='storage')")
        super().setup(trainer)
        ending.end_together_after_sigterm(trainer)
        watch_steps(trainer, partial(self._record, after_batch=True))
        if not self._resumes:
            load_only_own_states(trainer)
        if self._training_engine is not None:
            save_beside_training(trainer, self._training_engine.saves, finish=self._finish_saves)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        resumable = self._settings.transfer.is_resumable and self.lightning_module.trainer.training
        return keeping_position(loader) if resumable else loader

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        ending.give_up_soon_after_sigterm()
        assert self.lightning_module is not None
        load_loader_states(self.lightning_module.trainer)
        state, self._random_state = self._random_state, None
        if state is not None:
            restore(state, self.root_device)
            if self._goes_on_after_batch:
                go_on_after_batch(self.lightning_module.trainer)
            else:
                continue_epoch(self.lightning_module.trainer)
                if self._resumes:
                    begin_first_epoch(self.lightning_module.trainer)
        if self._settings.transfer.is_resumable:
            assert self._training_engine is not None
            self._recorder = TrainingRecorder(
                self._training_engine,
                how_to_resume=_HOW_TO_RESUME,
                gap="training_step takes several optimizer steps, and a record is written at the end of a batch only",
            )
            if not self._resumes:  # else the record that the fit resumes from holds until the next step
                self._record(after_batch=False)
        elif self.is_global_zero:
            say_if_not_resumable(self._settings.transfer)

    def _record(self, *, after_batch: bool) -> None:
        """Write a training record.

        Args:
            after_batch: Whether the loop is done with a batch; otherwise the fit is about to begin.
        """
        if self._recorder is None:
            return
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        loop = {
            "after_batch": after_batch,
            RNG_KEY: capture(self.root_device, world_size=self.world_size),
            **loop_state(trainer),
        }
        self._recorder.record(loop, step=trainer.global_step)

    def _resume_from_storage(self) -> ClientState:
        """Restore the engine from the training record; return what a checkpoint holds for Lightning."""
        from lightning_smartinfinity.zero3.collectives import raising_together

        assert self._training_engine is not None and self.lightning_module is not None
        loop: ClientState = {}
        with raising_together():
            loop = resume_engine(self._training_engine)
        self._goes_on_after_batch, self._random_state = loop["after_batch"], loop[RNG_KEY]
        return restore_loop(self.lightning_module.trainer, loop)

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        assert self.lightning_module is not None
        self._choose_storage(self.lightning_module.trainer.default_root_dir)
        with self._building(super().model_sharded_context, self.lightning_module):
            yield

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        optimizer, module = self._near_storage_optimizer, self.lightning_module
        if optimizer is not None and module is not None:
            # Lightning's own loop tells when a step follows; a manual one may do anything between backward and step.
            accumulates = module.trainer.fit_loop._should_accumulate()
            optimizer.step_follows = module.automatic_optimization and not accumulates

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            _refuse_closure(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        ending.begin_evaluation_batch(self.lightning_module)
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        ending.begin_evaluation_batch(self.lightning_module)
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        ending.begin_evaluation_batch(self.lightning_module)
        return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self.drain()
        ending.begin_evaluation(self.lightning_module)
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self.drain()
        ending.begin_evaluation(self.lightning_module)
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self.drain()
        ending.begin_evaluation(self.lightning_module)
        super().on_predict_start()

    @override
    def on_train_end(self) -> None:
        self.drain()
        self._finish_saves()
        super().on_train_end()

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
        # DeepSpeed saves it, rank by rank. Lightning would put it into a dictionary that save_checkpoint discards.
        return {}

    @override
    def save_checkpoint(self, checkpoint: ClientState, filepath: str | Path, storage_options: Any = None) -> None:
        check_save_path(filepath)
        if self._training_engine is None:
            raise UnsupportedError(
                "save_checkpoint was called on a Trainer that has trained nothing.",
                "Call it during or after fit; what was evaluated is in the checkpoint that it came from.",
            )
        present, optimizer = self.model, self._near_storage_optimizer
        self.model = self._training_engine
        try:
            if optimizer is not None:
                # Lightning leaves these states out with save_weights_only=True.
                optimizer.saves_weights_only = "optimizer_states" not in checkpoint
            with saving():
                # After SIGTERM this raises within seconds if the storage does not answer. If it does, the checkpoint
                # has as much time for each request as any other.
                self.drain()
                take_back_ask_to_end()
                checkpoint[RNG_KEY] = capture(self.root_device, world_size=self.world_size)
                if "loops" in checkpoint and self.lightning_module is not None:
                    checkpoint["loops"] = without_positions(checkpoint["loops"], self.lightning_module.trainer)
                super().save_checkpoint(checkpoint, filepath, storage_options)
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
        from lightning_smartinfinity.zero3.checkpoints.checkpoint_folder import reading_checkpoint
        from lightning_smartinfinity.zero3.checkpoints.full_weights import full_state_dict
        from lightning_smartinfinity.zero3.checkpoints.load_save import load_engine
        from lightning_smartinfinity.zero3.checkpoints.trust import door, load_by
        from lightning_smartinfinity.zero3.collectives import raising_together
        from lightning_smartinfinity.zero3.engine import PortableEngine

        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        doing = trainer.state.fn
        if self._resumes:
            return self._resume_from_storage()
        if weights_only is None:
            weights_only = passed_to_run(trainer, "weights_only")
        consent = f"weights_only=False to Trainer.{doing.value if doing else 'fit'}"
        with io_limit(self._settings.transfer.io_timeout), door(weights_only, consent=consent):
            if self.load_full_weights:
                with raising_together(), reading_checkpoint(checkpoint_path):
                    loaded: ClientState = load_by(super().load_checkpoint, checkpoint_path)
                    full_state_dict(loaded, checkpoint_path)
                return loaded
            assert isinstance(self.model, PortableEngine)
            # DeepSpeedStrategy's own version accepts only folders that Lightning saved.
            client_state = load_engine(
                checkpoint_path,
                self.model,
                with_optimizer=doing == TrainerFn.FITTING,
                strict=self.lightning_module.strict_loading,
                needed=_RESUMED_FROM,
            )
        client_state.setdefault(LIGHTNING_KEY, lightning.__version__)  # Lightning reads it before an evaluation, too
        self._take_random_state(client_state)
        return client_state

    def _take_random_state(self, client_state: ClientState) -> None:
        """Keep the saved random states until training starts, if it resumes with them."""
        state = client_state.pop(RNG_KEY, None)
        assert self.lightning_module is not None
        if state is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            usable = fits(state, world_size=self.world_size, warn=self.is_global_zero)
            self._random_state = state if usable else None

    @override
    def _restore_zero_state(self, ckpt: SavedState, strict: bool) -> None:
        from lightning_smartinfinity.zero3.checkpoints.full_weights import load_full_weights

        assert self.lightning_module is not None
        optimizer = self._near_storage_optimizer if self.model is self._training_engine else None
        writes = None if optimizer is None else optimizer.outside_writes
        load_full_weights(self.lightning_module, ckpt["state_dict"], writes=writes, strict=strict)

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        from lightning_smartinfinity.zero3.engine_setup import build_evaluation_engine, refuse_in_fit

        refuse_in_fit(model)
        self._begin_watch()
        # DeepSpeedStrategy's own version removes the user's hooks from the module, too.
        with self._parameters_on_storage():
            self.model = build_evaluation_engine(model, self.config, device_index=self.root_device.index)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._was_interrupted = True
        super().on_exception(exception)
        ending.end_by(exception, self.lightning_module)

    @override
    def teardown(self) -> None:
        super().teardown()
        if self.lightning_module is not None:
            save_in_turn(self.lightning_module.trainer)
        self._become_idle(completed=not self._was_interrupted)
        if self._recorder is not None and self.is_global_zero:
            if self._was_interrupted:
                self._recorder.say_how_to_resume(self._settings)
            elif self._rank_state is not None:  # an error that comes later may leave the state, too
                self._rank_state.keeping.told = partial(log_how_to_resume, self._settings, _HOW_TO_RESUME)
        self._recorder = None

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        try:
            optimizers, schedulers = _init_optimizers_and_lr_schedulers(self.lightning_module)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):  # Lightning's own refusal in automatic optimization
                raise _several_optimizers("several optimizers") from error
            raise
        if len(optimizers) != 1 or len(schedulers) > 1:
            raise _several_optimizers(f"{len(optimizers)} optimizers and {len(schedulers)} schedulers")
        if isinstance(optimizers[0], _MockOptimizer):  # Lightning's replacement for None
            raise UnsupportedError(
                f"{type(self.lightning_module).__name__}.configure_optimizers returned None.",
                f"Return one of torch.optim's {optimizer_names()}; without one, call validate, test or predict.",
            )
        return optimizers[0], schedulers[0] if schedulers else None

    @override
    def _setup_model_and_optimizer(
        self, model: torch.nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[SmartInfinityEngine, Optimizer]:
        assert optimizer is not None
        initialize = partial(super()._setup_model_and_optimizer, model, optimizer, lr_scheduler)
        return self._build_engine(model, optimizer, initialize)

    @override
    def init_deepspeed(self) -> None:
        # DeepSpeedStrategy's own version warns that configure_gradient_clipping does not clip, and refuses clipping by
        # value; here both work.
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.training:
            self._initialize_deepspeed_inference(self.lightning_module)
            return
        # Several micro-batches accumulate in fp32, also with 16-bit parameters.
        several = accumulates(self.lightning_module.trainer)
        self.config["data_types"] = {"grad_accum_dtype": "fp32"} if several else {}
        self._initialize_deepspeed_train(self.lightning_module)
        assert self._rank_state is not None
        self._rank_state.in_fit = True

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        # SmartInfinityPrecision.clip_gradients clips, when Lightning or the module asks for it.
        self.config["gradient_clipping"] = 0.0
        # DeepSpeed only prints it. Lightning would take it from a batch sampler, which may not exist.
        self.config["train_micro_batch_size_per_gpu"] = 1
        super()._format_config()
        # For DeepSpeed every step ends a window: see handles_gradient_accumulation.
        self.config["gradient_accumulation_steps"] = 1


def _several_optimizers(found: str) -> UnsupportedError:
    return UnsupportedError(
        f"configure_optimizers returned {found}.",
        "The smart_infinity strategy trains with one optimizer and at most one scheduler; use parameter groups.",
    )


def _refuse_closure(closure: object) -> None:
    if closure is not do_nothing_closure:
        raise UnsupportedError(
            "optimizer.step(closure=...) does not work with the smart_infinity strategy.",
            "Run forward and backward first, then call optimizer.step().",
        )

"""``Fabric(strategy="smart_infinity")``: the user's own loop with optimizer state that is kept on storage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.precision import DeepSpeedPrecision, Precision
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.wrappers import _unwrap_objects, is_wrapped
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.integrations.fabric.fit_record import FabricFitRecord
from lightning_smartinfinity.integrations.fabric.state import (
    move_into,
    read_state_dict,
    refuse_optimizer,
    refuse_options,
    split_state,
    weights_in,
)
from lightning_smartinfinity.integrations.lightning_options import (
    SharedOptions,
    indexed_device,
    swapped_precision,
    take_options,
)
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision
from lightning_smartinfinity.integrations.session import TrainingSession
from lightning_smartinfinity.planning.automatic_strategy import Surroundings
from lightning_smartinfinity.resume.schedules import prepare_loads
from lightning_smartinfinity.settings import (
    ActivationOffload,
    GradientCodec,
    PlanConfig,
    SmartSSDConfig,
    TransferConfig,
)
from lightning_smartinfinity.settings.options import OF_FABRIC
from lightning_smartinfinity.settings.strategy import STORAGE, check_save_path, data_types, documents_settings
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.ranks.watchdog import awaiting_ranks
from lightning_smartinfinity.zero3.untyped import ClientState, SavedState

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.portable import PortableEngine
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine

__all__ = ["SmartInfinityFabricStrategy"]


class FabricOptions(SharedOptions, total=False):
    """Settings that Lightning's own Fabric strategies accept, passed on unchanged."""

    accelerator: Accelerator | None
    cluster_environment: ClusterEnvironment | None
    precision: Precision | None


@documents_settings
class SmartInfinityFabricStrategy(TrainingSession, DeepSpeedStrategy):
    """:class:`~lightning_smartinfinity.SmartInfinityStrategy` for Lightning Fabric.

    One model with one optimizer trains at a time; further models may be set up without an optimizer. Gradients of all
    ``fabric.backward`` calls since the last step are summed, in fp32 with every precision.

    Args:
        **options: Settings of Fabric's ``DeepSpeedStrategy`` under the same names (:class:`FabricOptions`).

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
        UnsupportedError: A setting asks for something that the strategy does not support.

    Example::

        fabric = Fabric(strategy="smart_infinity", precision="bf16-mixed")
        fabric = Fabric(strategy=SmartInfinityFabricStrategy(storage=["/mnt/nvme0", "/mnt/nvme1"]))
    """

    _fit_record: FabricFitRecord

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
        **options: Unpack[FabricOptions],
    ) -> None:
        # DeepSpeedStrategy's own constructor is skipped: see take_options.
        super(DeepSpeedStrategy, self).__init__(
            accelerator=options.get("accelerator"),
            parallel_devices=options.get("parallel_devices"),
            cluster_environment=options.get("cluster_environment"),
            precision=options.get("precision"),
            process_group_backend=options.get("process_group_backend"),
        )
        self._take_settings(locals())
        self.config = self._engine_config
        take_options(self, options, known=FabricOptions, remedies=OF_FABRIC)
        self._backward_sync_control = _AlwaysSync()
        self._deepspeed_engine = None
        self._fit_record = FabricFitRecord()

    def resume(
        self,
        start: str = STORAGE,
        *,
        checkpoints: str | Path | Sequence[str | Path] = (),
        weights_only: bool | None = None,
    ) -> None:
        """Make the next ``fabric.setup`` with an optimizer continue an interrupted training from storage.

        Then call ``fabric.load("storage", state)``: it restores the state that was last passed to :meth:`record`.
        With ``"storage-or-new"`` it resumes from the newest of storage and ``checkpoints`` by optimizer steps (of equal
        ones a checkpoint, unless it was saved between backward and step), or begins, where
        ``fabric.load("storage-or-new", state)`` changes nothing. ``fabric.load`` takes either word.

        Args:
            start: ``"storage"``, or ``"storage-or-new"``.
            checkpoints: Path or paths passed to ``fabric.save``, for ``"storage-or-new"``; missing ones do not count.
            weights_only: As of ``fabric.load``, for reading the steps of ``checkpoints``.

        Raises:
            ConfigError: The settings keep nothing to resume from, or an argument is wrong.
            UnsupportedError: A training was set up already.
        """
        self._refuse_second_training("fabric.strategy.resume", "Call it before fabric.setup")
        self._fit_record.ask(start, checkpoints, self._settings, weights_only=weights_only)

    def record(self, state: Mapping[str, Any]) -> None:
        """Write a training record, from which an interrupted training resumes after the last step.

        Call it on every rank once after each step, at the end of the loop's iteration. It accepts the same state as
        ``fabric.save`` and takes milliseconds. It does nothing if ``TransferConfig`` keeps nothing to resume from.
        Random generators are restored only if the state has a :class:`~lightning_smartinfinity.RandomStates`. Values
        that a record cannot hold cause one warning.

        Args:
            state: The trained model, its optimizer and whatever else the loop needs: plain values, tensors, arrays, and
                objects with ``state_dict`` and ``load_state_dict``.

        Raises:
            UnsupportedError: The state has no model, or not the trained one; or the call is between backward and step,
                or before ``fabric.load("storage", state)``.
        """
        engine, rest = split_state(_unwrap_objects(dict(state)))
        if self._training_engine is None or engine is not self._training_engine:
            raise UnsupportedError(
                "fabric.strategy.record was given a model that was set up without an optimizer.",
                "Pass the model that is trained.",
            )
        self._fit_record.require_loaded()
        optimizer = self._training_engine.optimizer
        if optimizer.rank_state.arena.active.any():
            raise UnsupportedError(
                "fabric.strategy.record was called between backward and step, where no training can resume.",
                "Call it after optimizer.step().",
            )
        if not self._fit_record.is_on:
            self._fit_record.begin(self._training_engine, self._settings.transfer, says=self.is_global_zero)
        if self._fit_record.is_on:
            keeping = optimizer.rank_state.keeping
            keeping.says_end = False
            if self.is_global_zero:
                keeping.told = partial(self._fit_record.say_how_to_resume, self._settings)
            loop = self._convert_stateful_objects_in_state(rest, filter={})
            self._fit_record.record(loop, step=int(self._training_engine.global_steps))

    @override
    def close(self) -> None:
        if self._rank_state is not None and self._rank_state.is_open:
            keeping = self._rank_state.keeping
            has_recorded = self._fit_record.is_on or keeping.saved or not keeping.resumable  # else it only resumed
            keeping.completed = sys.exc_info()[0] is None and has_recorded
        super().close()
        self._fit_record.close()

    @property
    @override
    def root_device(self) -> torch.device:
        return indexed_device(super().root_device, self.local_rank)

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = swapped_precision(
            precision, stock=DeepSpeedPrecision, own=SmartInfinityFabricPrecision, entry="Fabric"
        )

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:  # type: ignore[override]
        # A single process keeps the loader's own order, as without DeepSpeed.
        return super().distributed_sampler_kwargs if self.num_nodes * self.num_processes > 1 else None

    def _has_fp32_in_memory(self, model: torch.nn.Module) -> bool:
        return "mixed" in self.precision.precision

    @override
    def setup_environment(self) -> None:
        self._prepare_environment(super().root_device, local_world_size=self.num_processes)
        # DeepSpeedStrategy's own version refuses every accelerator but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def _setup_distributed(self) -> None:
        with awaiting_ranks():
            if self.root_device.type == "cuda":
                super()._setup_distributed()
                return
            # DeepSpeedStrategy's own version first validates GPU indices, and a CPU has none.
            reset_seed()
            self._set_world_ranks()
            self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True

    @override
    def _format_config(self) -> None:
        super()._format_config()
        # Only the user's loop knows the number of micro-batches of a step, and whether it clips.
        self.config["gradient_accumulation_steps"] = 1
        self.config["gradient_clipping"] = 0.0
        self.config["data_types"] = data_types(self._settings.transfer, accumulates=True)

    @contextmanager
    @override
    def module_sharded_context(self) -> Iterator[None]:
        self._choose_storage(Path.cwd())
        self._plan(None, self._surroundings())
        with self._building(super().module_sharded_context, None):
            yield

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[SmartInfinityEngine, list[Optimizer], Any]:
        if len(optimizers) != 1:
            raise UnsupportedError(
                f"fabric.setup was given {len(optimizers)} optimizers.",
                "The smart_infinity strategy trains with one optimizer; use parameter groups.",
            )
        self._refuse_second_training("fabric.setup", "One model with one optimizer trains at a time")
        # An earlier Fabric may be garbage whose storage is still open: a Fabric is part of a reference cycle.
        gc.collect()
        self._choose_storage(Path.cwd())
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    @override
    def _initialize_engine(
        self, model: Module, optimizer: Optimizer | None = None, scheduler: Any = None
    ) -> tuple[PortableEngine, Optimizer, Any]:
        from lightning_smartinfinity.zero3.engine.build import evaluation_engine, refuse_trained

        # Only the user steps the scheduler. If DeepSpeed's engine had it, it would step it a second time.
        initialize = super()._initialize_engine
        if optimizer is None:
            refuse_trained(model)
            self._begin_watch()
            self._choose_storage(Path.cwd())
            with self._parameters_on_storage(model), evaluation_engine():
                return initialize(model)
        if not hasattr(next(model.parameters(), None), "ds_id"):  # else module_sharded_context has planned it
            self._plan(model, replace(self._surroundings(), optimizer=type(optimizer).__name__))
        self._fit_record.choose(self._settings, settle=self._settle_earlier)
        engine, _ = self._build_engine(model, optimizer, lambda: initialize(model, optimizer)[:2])
        engine.optimizer.used_gradients.expects_reset = True
        self._fit_record.begin_set_up()
        return engine, optimizer, scheduler

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            precision=self.precision.precision,
            accumulate=2,  # any number above 1: gradients of several micro-batches take more memory
            processes=self.num_processes,
            nodes=self.num_nodes,
            on_gpu=self._on_cuda,
            tell=rank_zero_info,
        )

    @override
    def backward(self, tensor: torch.Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        if module is not self._training_engine:
            raise UnsupportedError(
                "fabric.backward was called for a model that was set up without an optimizer.",
                "Pass the model that is trained: fabric.backward(loss, model=model).",
            )
        if args or set(kwargs) - {"retain_graph"} or tensor.numel() != 1:
            raise UnsupportedError(
                f"fabric.backward({type(tensor).__name__} of shape {tuple(tensor.shape)}, "
                f"{', '.join([*map(repr, args), *kwargs])}) does not work with the smart_infinity strategy.",
                "Pass a loss of one element, and no other argument than retain_graph.",
            )
        self._fit_record.require_loaded()
        super().backward(tensor, module, **kwargs)

    # If a strategy overrides backward, Fabric makes torch.autograd.grad raise. Its check unwraps ours, and finds none.
    backward.__wrapped__ = Strategy.backward  # type: ignore[attr-defined]

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        from lightning_smartinfinity.zero3.optimizer.clipping import clip_norm, norm_as_torch

        if float(norm_type) != 2.0:
            raise UnsupportedError(
                f"fabric.clip_gradients(norm_type={norm_type!r}) does not work with the smart_infinity strategy.",
                "Use norm_type=2.0, or clip by value.",
            )
        trained = self._training_optimizer
        assert trained is not None, "gradients are clipped in a training"
        norm = clip_norm(trained, float(max_norm))
        return norm_as_torch(norm, error_if_nonfinite=error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        from lightning_smartinfinity.zero3.optimizer.clipping import clip_values

        trained = self._training_optimizer
        assert trained is not None, "gradients are clipped in a training"
        clip_values(trained, float(clip_val))

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        from lightning_smartinfinity.zero3.checkpoints.formats.client_state import refuse_reserved
        from lightning_smartinfinity.zero3.engine.load_save import save_engine

        refuse_options(storage_options=storage_options, filter=filter)
        check_save_path(path)
        engine, rest = split_state(state)
        if engine is not self._training_engine:
            raise UnsupportedError(
                "fabric.save was given a model that was set up without an optimizer.",
                "Save the model that is trained; the weights of others are in the checkpoint that they came from.",
            )
        refuse_reserved(rest)
        client_state = self._convert_stateful_objects_in_state(rest, filter={})
        path = self.broadcast(path)
        save_engine(engine, path, client_state, exclude_frozen=self.exclude_frozen_parameters)

    @override
    def _module_to_save(self, module: Module | None) -> Module:
        whole: Any = module if module is not None else self._training_engine or self._deepspeed_engine
        if whole is None:
            raise UnsupportedError(
                "save_pretrained was called before a model was set up.",
                "Call it after fabric.setup or fabric.setup_module.",
            )
        return cast(Module, whole.module if module is None or is_wrapped(whole) else whole)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy
        from lightning_smartinfinity.zero3.engine.load_save import load_engine

        if isinstance(state, Module):  # fabric.load_raw
            engine, _ = split_state({"model": state})
            with loading_policy(weights_only, consent="weights_only=False to fabric.load_raw"):
                weights = read_state_dict(self.checkpoint_io.load_checkpoint, path)
                self._load_weights(weights, engine, strict=strict)
            return {}
        if not isinstance(state, dict):
            raise UnsupportedError(
                f"{str(path)!r} cannot be loaded into {type(state).__name__}.",
                "Pass a dictionary: fabric.load(path, {'model': model, 'optimizer': optimizer}).",
            )
        engine, rest = split_state(state)
        is_start = engine is self._training_engine and self._fit_record.is_asked_for(path)
        if is_start and not self._fit_record.awaits_load:
            self._fit_record.has_loaded()
            return {}
        path = self._fit_record.checkpoint or path if is_start else path
        with_optimizer = len(rest) + 1 < len(state)
        limit = io_limit(self._settings.transfer.io_timeout)
        with limit, loading_policy(weights_only, consent="weights_only=False to fabric.load"):
            if is_start and self._fit_record.resumes:
                assert self._training_engine is not None
                loaded = self._fit_record.restore(self._training_engine)
                if self.is_global_zero:
                    keeping = self._training_engine.optimizer.rank_state.keeping
                    keeping.told = partial(self._fit_record.say_how_to_resume, self._settings)
            elif self.load_full_weights:
                refuse_optimizer(with_optimizer)
                loaded = self._load_full(path, state, engine, strict=strict)
            else:
                loaded = load_engine(path, engine, with_optimizer=with_optimizer, strict=strict)
        if is_start:
            self._fit_record.has_loaded()
        schedulers = (value for key, value in rest.items() if key in loaded)
        prepare_loads(schedulers, new_settings=self._own_hyperparameters)
        move_into(rest, loaded, path=path, strict=strict)
        state.update(rest)
        return loaded

    def _load_full(self, path: str | Path, state: ClientState, engine: PortableEngine, *, strict: bool) -> ClientState:
        """Load weights from a file that has the state's own keys, and return the file's other entries."""
        from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import await_seen

        (key,) = (key for key, value in state.items() if value is engine)
        await_seen(path)
        contents = dict(read_state_dict(self.checkpoint_io.load_checkpoint, path))
        weights = weights_in(contents, key, path)
        self._load_weights(weights, engine, strict=strict)
        return contents

    def _load_weights(self, weights: SavedState, engine: PortableEngine, *, strict: bool) -> None:
        from lightning_smartinfinity.zero3.engine.load_save import load_weights

        load_weights(weights, engine, trained=engine is self._training_engine, strict=strict)

    def _refuse_second_training(self, call: str, rule: str) -> None:
        if self._rank_state is not None and self._rank_state.is_open:
            raise UnsupportedError(
                f"{call} was called while a model is being trained.",
                f"{rule}: call fabric.strategy.close() to end the first one's training, or set up models that only "
                "evaluate by fabric.setup_module(model).",
            )


class _AlwaysSync(_BackwardSyncControl):
    """Synchronizes every micro-batch: ZeRO-3 reduces each one's gradients, as no rank has room for whole gradients."""

    @override
    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()

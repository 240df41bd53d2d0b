"""The training engine and its storage, shared by the three entry points: Trainer, Fabric and transformers."""

from __future__ import annotations

import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_smartinfinity.common.freed_memory import return_freed_memory
from lightning_smartinfinity.devices.base import Traffic
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import feed_back_threads
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.planning.automatic_strategy import Planned, Surroundings, plan_training, warn_of_no_gain
from lightning_smartinfinity.resume.record import FitRecord
from lightning_smartinfinity.settings import resolved_folder
from lightning_smartinfinity.settings.rules import check, instance, optional
from lightning_smartinfinity.settings.smartssd import require_xclbin_named
from lightning_smartinfinity.settings.strategy import (
    StrategySettings,
    given_settings,
    gradients_are_16_bit,
    is_16_bit,
    nvme_path_of,
)
from lightning_smartinfinity.storage.io.scheduling import IoWait, io_waits, share_devices
from lightning_smartinfinity.zero3 import (
    OffloadSettings,
    build_deepspeed_config,
    prepare_environment,
    require_descriptors,
)
from lightning_smartinfinity.zero3.ranks.watchdog import begin_watch, end_watch, saving
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

if TYPE_CHECKING:
    from lightning_smartinfinity.pipeline.handler import TransferHandler
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
    from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
    from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
    from lightning_smartinfinity.zero3.parameters.param_swapper import ParameterSwapper

__all__ = ["TrainingSession"]

T = TypeVar("T")

_TRIAL = ".trial"  # suffix of the job of a search, or of a few batches, before the user's own fit


class TrainingSession(ABC):
    """Base class of the three entry points. It depends on neither Lightning nor transformers.

    In a strategy's bases it precedes one of Lightning's two ``DeepSpeedStrategy`` classes. It calls none of their
    methods.

    Attributes:
        config: DeepSpeed's configuration, under Lightning's name for it.
    """

    config: Any
    _fit_record: FitRecord

    def _take_settings(self, arguments: Mapping[str, Any]) -> None:
        """Check and store the user's settings, and build DeepSpeed's configuration from them.

        Args:
            arguments: ``locals()`` of the constructor, which has a parameter for each setting.
        """
        owner = type(self).__name__
        settings = given_settings(owner, arguments)
        if settings.update_device == "smartssd":
            require_xclbin_named(settings.smartssd)
        if settings.update_device == "host" and settings.smartssd is not None:
            warnings.warn("smartssd=... is ignored with update_device='host'.", stacklevel=3)
        ignored = settings.transfer.ignored
        if ignored:
            warnings.warn(
                f"TransferConfig({', '.join(ignored)}) is ignored without durability='interval'.", stacklevel=3
            )
        self._settings = self._asked = settings
        self._planned: Planned | None = None
        self._planned_for: weakref.ref[torch.nn.Module] | None = None
        self._own_hyperparameters = False
        self._is_trial = False  # whether the next training is a search or a few batches, and the user's comes later
        self._idle_key: tuple[tuple[Path, ...], str] | None = None
        self._local_world_size, self._on_cuda = 1, False
        # The engine of the last training. Later runs may replace the strategy's engine, but only this one can save.
        self._training_engine: SmartInfinityEngine | None = None
        self._closed_at_exit: tuple[TransferHandler, weakref.finalize[Any, Any]] | None = None
        self._watch = 0
        # The swapper of parameters on storage.
        self._parameters: ParameterSwapper | None = None
        self._nvme_path = nvme_path_of(settings.zero, owner=owner)
        # DeepSpeed's configuration; precision and accumulation are filled in before the training is set up. A plan puts
        # parameters on storage, with a byte budget, unless the user chose another place.
        is_planned = settings.plan is not None and not (settings.zero or {}).get("offload_param")
        self._engine_config: DeepSpeedConfig = build_deepspeed_config(
            settings.zero,
            parameter_bytes="auto" if is_planned else settings.transfer.parameter_bytes,
            owner=owner,
        )

    def close(self) -> None:
        """Release the ring and remove parameters and, unless ``transfer.keep`` is set, optimizer state from storage.

        After training, the state stays readable (``save_checkpoint``) until this call, the next training on the same
        storage, or the interpreter's exit. Parameters on storage (``offload_param``) stay until this call, or until
        neither their model nor the strategy exists. Parameters that another strategy of this process uses stay until
        that strategy is closed. A second call does nothing.

        A step in progress is completed first. With ``overlap`` a step may be in progress, so with several processes
        every rank must call this.
        """
        self._close_state(since="close() was called")
        if self._parameters is not None:
            self._parameters.leave(self)
            self._parameters = None
        end_watch(self._watch)

    def use_new_hyperparameters(self) -> None:
        """Make a training that resumes use the script's learning rate, weight decay, betas and schedules.

        Call this before the training is set up. Otherwise a resumed training keeps the values that were saved, even if
        the script sets others. The state of the optimizer, such as its moments, is kept. Schedulers of torch take as
        many steps at once as the saved ones had taken, so that the learning rate is that of a training that had the
        new values from its first step. A ``ReduceLROnPlateau`` keeps its counters, and begins at the new rate.
        """
        self._own_hyperparameters = True

    def drain(self) -> None:
        """Wait until every rank has committed the last step; with ``overlap`` its update may still be running.

        This is a collective: every rank calls it. Everything that reads or writes parameters or state drains first.

        Raises:
            ConfigError, StorageError, DeviceError, CudaError: The step failed on some rank, and was rolled back on all.
        """
        optimizer = self._training_optimizer
        if optimizer is not None:
            optimizer.update.drain()

    def save_pretrained(
        self,
        folder: str | Path,
        module: torch.nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Save a model of transformers for ``from_pretrained``, without an intermediate checkpoint.

        This is a collective: every rank calls it, during a fit, after it, or when the model is only evaluated. The
        first rank writes, with bounded memory. ``folder`` ends up complete or unchanged.

        Args:
            folder: Path of the folder. If it exists, its older weights are replaced and its other files stay.
            module: The model, or a module that contains it. Default: the whole module; if it contains no model of
                transformers, it is saved under its own parameter names.
            dtype: Dtype of trained weights. Default: the training's dtype, with bits equal to the training's weights;
                ``torch.float32`` saves the master weights unchanged.
            max_shard_size: Largest size of a file in bytes, or as ``"5GB"``. Default: that of transformers.

        Raises:
            SmartInfinityError: An argument is wrong, the model cannot be saved, or ``folder`` is a file or cannot be
                written; raised on every rank.
        """
        from lightning_smartinfinity.export.from_training import save_module

        check("save_pretrained", "dtype", dtype, optional(instance(torch.dtype)))
        check("save_pretrained", "module", module, optional(instance(torch.nn.Module)))
        save_module(self._module_to_save(module), Path(folder), dtype=dtype, max_shard_size=max_shard_size)
        if self._rank_state is not None:
            self._rank_state.keeping.saved = True

    @abstractmethod
    def _module_to_save(self, module: torch.nn.Module | None) -> torch.nn.Module:
        """Return the module that :meth:`save_pretrained` saves, without the wrappers of Lightning and DeepSpeed."""

    def _close_state(self, *, since: str) -> None:
        optimizer = self._training_optimizer
        if optimizer is not None:
            optimizer.close_storage(since=since)

    def traffic(self) -> Traffic:
        """Return this rank's counters since its storage was opened; all zero before training and after :meth:`close`.

        Transfers of parameters on storage are included, from the building of the model on.
        """
        state = self._rank_state
        traffic = Traffic() if state is None else state.traffic()
        return traffic if self._parameters is None else traffic + self._parameters.traffic()

    def io_waits(self) -> list[IoWait]:
        """Return how long I/O classes waited for each other on this process's devices, a row per device and pair."""
        return io_waits()

    @property
    def state_numel(self) -> int:
        """Number of elements in this rank's partition that the optimizer updates; 0 before training."""
        state = self._rank_state
        return 0 if state is None else state.partition.layout.numel

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state on storage, over all places of a tasklet; 0 before training."""
        state = self._rank_state
        return 0 if state is None else state.storage_bytes

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory that the update holds on this rank, by purpose; empty before training."""
        state = self._rank_state
        held = {} if state is None else state.host_bytes
        return held if self._parameters is None else {**held, "parameter_buffers": self._parameters.host_bytes}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters on storage; 0 unless they are offloaded to ``nvme``."""
        return 0 if self._parameters is None else self._parameters.storage_bytes

    @property
    def _rank_state(self) -> RankState | None:
        optimizer = self._training_optimizer
        return None if optimizer is None else optimizer.rank_state

    @property
    def _training_optimizer(self) -> StorageOptimizer | None:
        return None if self._training_engine is None else self._training_engine.optimizer

    def _prepare_environment(self, device: torch.device, *, local_world_size: int) -> None:
        """Prepare the environment before the first import of DeepSpeed, and check settings that depend on it."""
        self._local_world_size, self._on_cuda = local_world_size, device.type == "cuda"
        require_descriptors(num_processes=local_world_size, num_folders=len(self._settings.storage or ("",)))
        share_devices(local_world_size)
        prepare_environment(device.type, local_world_size=local_world_size)
        from lightning_smartinfinity.zero3.setup.validation import check_zero_section

        check_zero_section(self._engine_config["zero_optimization"], owner=type(self).__name__)
        self._fit_record.name_calls()

    def _build_engine(
        self, model: torch.nn.Module, optimizer: Optimizer, initialize: Callable[[], tuple[SmartInfinityEngine, T]]
    ) -> tuple[SmartInfinityEngine, T]:
        """Call ``deepspeed.initialize`` so that the returned engine keeps optimizer state on storage.

        Args:
            model: Module to train.
            optimizer: Optimizer of torch over the model's parameters.
            initialize: Function that returns the engine and the other results.
        """
        from lightning_smartinfinity.zero3.engine.build import engine_with, refuse_in_fit
        from lightning_smartinfinity.zero3.optimizer.earlier_state import (
            earlier_state,
            keep_masters,
            write_earlier_state,
        )
        from lightning_smartinfinity.zero3.optimizer.parameter_groups import check_parameters
        from lightning_smartinfinity.zero3.optimizer.release import end_training_of, release_module, trainings_of
        from lightning_smartinfinity.zero3.optimizer.taken_optimizer import check_takeable, take_over
        from lightning_smartinfinity.zero3.parameters.partition import make_contiguous
        from lightning_smartinfinity.zero3.parameters.unrounded import note_fp32_in_memory
        from lightning_smartinfinity.zero3.ranks.collectives import raising_together
        from lightning_smartinfinity.zero3.setup.open_storage import require_parameter_space
        from lightning_smartinfinity.zero3.setup.validation import (
            check_dtype,
            check_model,
            check_optimizer,
            check_state_format,
        )

        with raising_together():
            refuse_in_fit(model)
            check_model(model)
            if self._planned is not None:
                self._planned.require_optimizer(type(optimizer).__name__)
            check_takeable(optimizer)
            check_optimizer(optimizer, state_format=self._settings.state_format)
            check_parameters(optimizer, model)
            earlier = earlier_state(optimizer)
            check_dtype(model, self._engine_config)
            check_state_format(self._settings.state_format, self._engine_config)
        self._begin_watch()
        later = f"a training of {type(model).__name__} that began at {time.strftime('%H:%M:%S')}"
        goes_on = self._has_fp32_in_memory(model) and not self._fit_record.resumes
        kept = keep_masters(trainings_of(model), of=type(model).__name__) if goes_on else None
        idle = self._release_storage(later)
        end_training_of(model, since=f"{later} took its module")
        release_module(model)
        make_contiguous(model)
        offload = self._offload_for(optimizer)
        with self._parameters_on_storage(model), engine_with(offload):
            if self._parameters is not None:
                self._parameters.users -= idle  # our close() now removes the parameters
                require_parameter_space(
                    self._parameters.settings, offload, model, optimizer, in_16_bit=is_16_bit(self._engine_config)
                )
            engine, rest = initialize()
        take_over(optimizer, engine)
        if self._has_fp32_in_memory(model):
            note_fp32_in_memory(model.parameters())
        self._close_at_exit(engine.optimizer.rank_state)
        self._training_engine = engine
        if not offload.resumes:
            if earlier:
                write_earlier_state(engine.optimizer, earlier)  # sets masters to parameters, which are rounded
            engine.optimizer.outside_writes.bring_in(engine.optimizer.partition.params())
        if kept is not None:
            kept.bring_into(engine.optimizer)
        return engine, rest

    def _close_at_exit(self, state: RankState) -> None:
        """Close the state when the session is deleted or the interpreter exits; its settings say whether it stays."""
        if self._closed_at_exit is not None and self._closed_at_exit[0].is_closed:
            self._closed_at_exit[1].detach()  # it would hold the manifest of every training
        self._closed_at_exit = state.handler, weakref.finalize(self, state.closer())

    @property
    def _settings_of_state(self) -> StrategySettings:
        """The settings of the training's state: a trial has a job of its own, and leaves nothing."""
        transfer = self._settings.transfer
        if not self._is_trial:
            return self._settings
        return replace(self._settings, transfer=replace(transfer, job=f"{transfer.job}{_TRIAL}", keep=False))

    @abstractmethod
    def _has_fp32_in_memory(self, model: torch.nn.Module) -> bool:
        """Return whether the same training in memory would have fp32 parameters, as in a mixed precision."""

    def _offload_for(self, optimizer: Optimizer) -> OffloadSettings:
        """Return the settings with the chosen update device; warn if compression brings no gain."""
        from lightning_smartinfinity.zero3.setup.update_device import choose_update_device, compute_threads

        settings = self._settings_of_state
        assert settings.storage is not None
        threads = compute_threads(
            settings.transfer.compute_threads, num_processes=self._local_world_size, on_gpu=self._on_cuda
        )
        transfer = replace(settings.transfer, compute_threads=threads)
        offload = OffloadSettings(
            **{**vars(settings), "transfer": transfer},
            gradient_itemsize=2 if gradients_are_16_bit(self._engine_config) else 4,
            parameter_itemsize=2 if is_16_bit(self._engine_config) else 4,
            feed_back_threads=feed_back_threads(threads, self._local_world_size),
            resumes=self._fit_record.resumes,
            records=self._fit_record.automatic,
            own_hyperparameters=self._own_hyperparameters or self._is_trial,  # a search restores what it has changed
            check_record=self._fit_record.check,
        )
        offload = choose_update_device(offload, optimizer=type(optimizer).__name__)
        warn_of_no_gain(
            offload,
            num_arrays=len(rule_for(optimizer).arrays),
            num_processes=self._local_world_size,
            on_gpu=self._on_cuda,
        )
        return offload

    @contextmanager
    def _parameters_on_storage(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Put parameters that DeepSpeed partitions in this context into our files, if ``offload_param`` says so.

        Args:
            model: The model, if it exists already.
        """
        from lightning_smartinfinity.zero3.setup.validation import parameter_settings

        storage, transfer = self._settings.storage, self._settings.transfer
        assert storage is not None
        section = self._engine_config["zero_optimization"]
        settings = parameter_settings(section, storage=storage, nvme_path=self._nvme_path, transfer=transfer)
        if settings is None:
            yield
            return
        from lightning_smartinfinity.zero3.parameters.live_parameters import require_parameter_budget
        from lightning_smartinfinity.zero3.parameters.param_swapper import swapper_for, swapping_with

        if model is not None:
            require_parameter_budget(settings, model, in_16_bit=is_16_bit(self._engine_config))
        self._parameters = swapper_for(settings, self)
        with swapping_with(self._parameters):
            yield

    @contextmanager
    def _building(
        self, sharded: Callable[[], AbstractContextManager[None]], module: torch.nn.Module | None
    ) -> Iterator[None]:
        """Enter Lightning's context in which ZeRO-3 partitions new modules, together with our own contexts.

        Args:
            sharded: Function that creates Lightning's context, which picks up the parameter swapper when it is created.
            module: The module being built, if it exists already.
        """
        from lightning_smartinfinity.zero3.engine.build import gathering_when_called
        from lightning_smartinfinity.zero3.parameters.gather_on_use import gathering_on_use
        from lightning_smartinfinity.zero3.parameters.module_guard import checking_layers
        from lightning_smartinfinity.zero3.parameters.partitioning import partitioning
        from lightning_smartinfinity.zero3.parameters.pretrained import loading_pretrained
        from lightning_smartinfinity.zero3.parameters.torch_functions import putting_torch_back

        with (
            self._parameters_on_storage(),
            putting_torch_back(),
            sharded(),
            partitioning("Building the model", None),
            gathering_on_use(module),
            checking_layers(),
            gathering_when_called(lambda: self._engine_config),
            loading_pretrained(self._engine_config),
        ):
            yield

    def _choose_storage(self, root: str | Path) -> None:
        """Default ``storage`` to ``<root>/smart_infinity``; raise ConfigError if the root is a URL."""
        if self._settings.storage is None:
            setting = f"{type(self).__name__}(storage=None) means a folder below {str(root)!r}, which"
            folder = resolved_folder(root, setting=setting) / "smart_infinity"
            self._settings = replace(self._settings, storage=(folder,))

    def _plan(self, module: torch.nn.Module | None, around: Surroundings) -> None:
        """Choose the settings that the user left open, if ``plan`` is set, once per module. Collective.

        Args:
            module: The module to train, if known.
            around: Known facts of the training, such as its precision and number of processes.
        """
        known = None if self._planned_for is None else self._planned_for()
        if self._asked.plan is None or (known is not None and known is module):
            return
        from lightning_smartinfinity.zero3.setup.validation import check_zero_section

        self._planned = plan_training(replace(self._asked, storage=self._settings.storage), module, around)
        self._settings = settings = self._planned.settings
        self._planned_for = None if module is None else weakref.ref(module)
        owner = type(self).__name__
        built = build_deepspeed_config(settings.zero, parameter_bytes=settings.transfer.parameter_bytes, owner=owner)
        section = self._engine_config["zero_optimization"]
        section.clear()
        section.update(built["zero_optimization"])
        check_zero_section(section, owner=owner)

    def _begin_watch(self) -> None:
        """Watch the other ranks until this strategy's training ends or :meth:`close` is called. Collective."""
        self._watch = begin_watch(self._settings.watchdog_timeout, self._settings.collective_timeout)

    def _release_storage(self, later: str) -> set[TrainingSession]:
        """Close the storage of this strategy's earlier training, and of idle strategies on the same folders.

        A trial and the fit after it are on the same folders, too: they would need space and memory for two states.

        Args:
            later: Name of the new training that takes the folders, for errors of later uses of the old one.

        Returns:
            The idle strategies.
        """
        storage, job = self._settings.storage, self._settings_of_state.transfer.job
        assert storage is not None
        folders = ", ".join(repr(str(folder)) for folder in storage)
        since = f"{later} took its storage {folders} (job {self._settings.transfer.job!r})"
        self._close_state(since=since)
        if self._training_engine is not None:
            self._training_engine.destroy()
            self._training_engine = None
        if self._idle_key is not None and _IDLE.get(self._idle_key, lambda: None)() is self:
            del _IDLE[self._idle_key]
        self._idle_key = (storage, job)
        names = (self._settings.transfer.job, f"{self._settings.transfer.job}{_TRIAL}")
        found = [_IDLE.pop((storage, name), lambda: None)() for name in names]
        idle = {one for one in found if one is not None and one is not self}
        for one in idle:
            one._close_state(since=since)
        return idle

    def _settle_earlier(self) -> bool:
        """Commit the last step of this process's earlier training on these folders, if its state stays. Collective.

        An error may have left that step in flight. It is committed if all ranks have it.

        Returns:
            Whether the set-up of the next training removes that state.
        """
        from lightning_smartinfinity.zero3.ranks.collectives import gather

        key: Any = (self._settings.storage, self._settings.transfer.job)
        sessions = [one for one in (self, _IDLE.get(key, lambda: None)()) if one is not None and one._idle_key == key]
        optimizers = {one._training_optimizer for one in sessions}
        trained = [one for one in optimizers if one is not None and one.rank_state.is_open]
        staying = [one for one in trained if one.rank_state.keeping.stays]
        in_flight = [one for one in staying if one.update.is_in_flight]
        if all(gather(bool(in_flight), None)):
            for optimizer in in_flight:
                optimizer.settle()
        return len(staying) < len(trained)

    def _become_idle(self, *, completed: bool) -> None:
        """Mark training as over; its state stays readable until the next training on the same storage.

        Args:
            completed: Whether the training ended without an error.
        """
        optimizer = self._training_optimizer
        if optimizer is not None:
            with saving():
                failure = optimizer.rank_state.background.join()
            if failure is not None:  # another error ends the training, so this one only warns
                warnings.warn(f"A checkpoint could not be saved: {failure}", stacklevel=2)
        end_watch(self._watch)
        if optimizer is not None:
            if optimizer.rank_state.in_fit:  # an evaluation after the training does not change its outcome
                optimizer.rank_state.keeping.end(completed=completed)
            optimizer.rank_state.in_fit = False
            optimizer.idle = self  # as long as the module exists: another training may start from its masters
            if optimizer.rank_state.activations is not None:
                optimizer.rank_state.activations.rest()
            optimizer.rank_state.held_signals.drop()
            # After an error, which this rank alone may have met, a step may still be in progress.
            optimizer.update.training_over()
            keeping = optimizer.rank_state.keeping
            if keeping.stays and optimizer.rank_state.writes_back:
                with saving():
                    optimizer.update.end_alone()
        return_freed_memory()  # no further step will use it
        if self._idle_key is not None:
            _IDLE[self._idle_key] = weakref.ref(self)


# Strategies whose training is over, by folders and job. Their state is readable until the next training closes it.
_IDLE: dict[tuple[tuple[Path, ...], str], weakref.ref[TrainingSession]] = {}

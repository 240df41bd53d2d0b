"""A context in which ``transformers.Trainer`` and Accelerate train with optimizer state that is kept on storage."""

from __future__ import annotations

import copy
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self, override

from lightning_smartinfinity.common.transformers_models import optional_package
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.session import TrainingSession
from lightning_smartinfinity.integrations.transformers.arguments import (
    Arguments,
    argument_remedies,
    check_arguments,
    has_adapters,
    job_of,
    refuse_quantized,
)
from lightning_smartinfinity.integrations.transformers.fit_record import RecordedTraining, TransformersFitRecord
from lightning_smartinfinity.integrations.transformers.launch import launched
from lightning_smartinfinity.integrations.transformers.resume import (
    begin_checkpoint,
    begin_state,
    checkpoint_to_resume,
    end_checkpoint,
    end_state,
    flush_file,
    require_undamaged,
    steps_of_checkpoints,
)
from lightning_smartinfinity.integrations.transformers.seams import (
    Trainer,
    accelerators_with_deepspeed,
    arguments_seen_by,
    completed_checkpoints_seen_by,
    fresh_accelerate,
    models_saved_by,
    random_states_seen_by,
    steps_taken_by_optimizers,
    trainers_of_context,
    trainings_seen_by,
    without_weights,
)
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.planning.automatic_strategy import Surroundings
from lightning_smartinfinity.resume.start import Source, choose_start
from lightning_smartinfinity.settings import (
    ActivationOffload,
    GradientCodec,
    PlanConfig,
    SmartSSDConfig,
    TransferConfig,
)
from lightning_smartinfinity.settings.options import refuse_unknown
from lightning_smartinfinity.settings.rules import check, instance
from lightning_smartinfinity.settings.strategy import STORAGE, STORAGE_OR_NEW, data_types, documents_settings
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine

__all__ = ["SmartInfinityTraining"]

_log = logging.getLogger(__name__)

_RESUME = "resume_from_checkpoint"

_AUTO: DeepSpeedConfig = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
_SAVES_16_BIT = {"stage3_gather_16bit_weights_on_model_save": True}
_DEFAULT_JOB = TransferConfig().job
# Keys of zero_optimization that a model without an optimizer must share with the trained model.
_PARTITIONING = ("stage", "offload_param")


@documents_settings
class SmartInfinityTraining(TrainingSession):
    """A context for ``transformers.Trainer`` and Accelerate, which keeps the state of their training on storage.

    Pass :attr:`config` to ``TrainingArguments(deepspeed=...)`` before the model is loaded, so that ``from_pretrained``
    partitions it. Batch size, accumulation, clipping and precision come from the arguments. When the context ends, the
    state is removed from storage, unless ``transfer`` keeps it.

    Args:
        weights_only: Whether checkpoints may contain only tensors, numbers, text and containers of these. Pass False
            only for checkpoints that you trust: loading other types runs code that the file names.

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
        UnsupportedError: A setting asks for something that this package does not support.

    Example::

        with SmartInfinityTraining(storage="/mnt/nvme") as training:
            args = TrainingArguments("finetuned", bf16=True, deepspeed=training.config)
            model = AutoModelForCausalLM.from_pretrained(folder)
            Trainer(model=model, args=args, train_dataset=dataset).train()
    """

    _fit_record: TransformersFitRecord

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
        weights_only: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            refuse_unknown(type(self).__name__, unknown, remedies=argument_remedies())
        self._take_settings(locals())
        self._config: DeepSpeedConfig = {**self._engine_config, **copy.deepcopy(_AUTO)}
        self._config["zero_optimization"] |= _SAVES_16_BIT
        self._given = self._settings
        check(type(self).__name__, "weights_only", weights_only, instance(bool))
        self._weights_only = weights_only
        self._contexts, self._of_arguments = ExitStack(), ExitStack()
        self._last_model: torch.nn.Module | None = None
        self._checkpoint: Path | None = None  # the checkpoint being saved
        self._trained: list[weakref.ref[Trainer]] = []
        self._fit_record = TransformersFitRecord()

    @property
    def config(self) -> DeepSpeedConfig:
        """DeepSpeed's configuration, with "auto" for values that ``TrainingArguments`` or Accelerate fill in.

        Raises:
            UnsupportedError: The context has not begun, or has ended: DeepSpeed would train without this package.
        """
        if self not in _ACTIVE:
            raise UnsupportedError(
                "SmartInfinityTraining.config was asked for outside of the `with`.",
                "Make arguments, model and Trainer within `with SmartInfinityTraining(...) as training:`.",
            )
        return self._config

    # ---- the context

    def __enter__(self) -> Self:
        for package in ("transformers", "accelerate"):
            optional_package(package, purpose="SmartInfinityTraining")
        if _ACTIVE:
            raise UnsupportedError(
                "A SmartInfinityTraining began within another one.", "End the first one: trainings come one by one."
            )
        on_gpu = torch.cuda.is_available()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self._given.plan is not None and world_size > 1:
            raise UnsupportedError(
                f"SmartInfinityTraining(plan=...) plans for one process, and WORLD_SIZE={world_size}.",
                "Leave plan out, and pass the settings that `smart-infinity plan` prints.",
            )
        if not on_gpu and world_size > 1:
            raise UnsupportedError(
                f"WORLD_SIZE={world_size}: on CPUs accelerate and DeepSpeed train in one process only.",
                "Start one process, or train in Lightning: Trainer(strategy='smart_infinity', devices=...).",
            )
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._prepare_environment(torch.device("cuda" if on_gpu else "cpu"), local_world_size=local_world_size)
        from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy
        from lightning_smartinfinity.zero3.engine.build import gathering_when_called, initializing_with
        from lightning_smartinfinity.zero3.parameters.partitioned_parameter import answering
        from lightning_smartinfinity.zero3.parameters.torch_functions import putting_torch_back

        self._plan_before_loading(on_gpu=on_gpu)
        self._engine_config = self._config
        with ExitStack() as contexts:
            consent = f"weights_only=False to {type(self).__name__}"
            contexts.enter_context(loading_policy(self._weights_only, consent=consent))
            contexts.enter_context(putting_torch_back())
            contexts.enter_context(launched())
            contexts.enter_context(fresh_accelerate())
            contexts.enter_context(arguments_seen_by(self._see_arguments))
            contexts.enter_context(models_saved_by(self._save_model))
            contexts.enter_context(random_states_seen_by(flush_file))
            contexts.enter_context(completed_checkpoints_seen_by(self._end_checkpoint))
            contexts.enter_context(trainings_seen_by(self._begin, self._recorded, self._end))
            contexts.enter_context(answering())
            contexts.enter_context(trainers_of_context())
            contexts.enter_context(accelerators_with_deepspeed(begin_state, end_state, require_undamaged))
            contexts.enter_context(steps_taken_by_optimizers())
            contexts.enter_context(initializing_with(self._initialize))
            contexts.enter_context(gathering_when_called(lambda: self._engine_config))
            _ACTIVE.append(self)
            contexts.callback(_ACTIVE.remove, self)
            self._of_arguments = contexts.enter_context(ExitStack())
            self._contexts = contexts.pop_all()
        return self

    def _plan_before_loading(self, *, on_gpu: bool) -> None:
        if self._given.plan is None:
            return
        storage = self._given.storage
        self._settings = replace(self._given, storage=storage or (Path.cwd(),))
        # The arguments do not exist yet. Gradients of several micro-batches take more memory than those of one.
        formats = (self._given.state_format, *self._given.plan.state_formats)
        in_bf16 = on_gpu or any(STATE_FORMATS[name].required_parameters == "bf16" for name in formats)
        precision = "bf16-true" if in_bf16 else "32-true"
        self._plan(None, Surroundings(precision=precision, accumulate=2, processes=1, nodes=1, on_gpu=on_gpu))
        self._given = self._settings = replace(self._settings, storage=storage)
        self._config["zero_optimization"] |= _SAVES_16_BIT

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._contexts:
            self._become_idle(completed=kind is None)
            if error is not None and self._rank_state is not None:
                self._rank_state.keeping.script_failed(error)
            self.close()

    # ---- called by transformers and accelerate

    def _see_arguments(self, given: DeepSpeedConfig, config: DeepSpeedConfig, args: Arguments) -> None:
        """Check new ``TrainingArguments``, and place the storage according to their output folder."""
        from lightning_smartinfinity.zero3.parameters.pretrained import releasing_pages

        self._require_own(config)
        changed = [name for name, value in _AUTO.items() if given.get(name) != value]
        if changed:
            raise ConfigError(
                f"{changed[0]!r} of SmartInfinityTraining.config was set to {given.get(changed[0])!r}.",
                "Leave it as it is, and set it in TrainingArguments, which know it by a name of their own.",
            )
        check_arguments(args)
        self._engine_config = config
        self._follow(args)
        self._of_arguments.close()  # those of earlier arguments
        self._of_arguments.enter_context(self._parameters_on_storage())
        self._of_arguments.enter_context(releasing_pages())

    def _follow(self, args: Arguments) -> None:
        """Place the storage in the arguments' output folder, or name the job after that folder."""
        self._settings = self._given
        if self._given.storage is None:
            self._choose_storage(args.output_dir)
        elif self._given.transfer.job == _DEFAULT_JOB:
            self._settings = replace(self._given, transfer=replace(self._given.transfer, job=job_of(args.output_dir)))

    def _begin(self, trainer: Trainer, resume: str | bool | None) -> str | bool | None:
        """Check a Trainer that is about to train, and return the checkpoint to resume from."""
        if trainer.accelerator.state.deepspeed_plugin is not trainer.args.deepspeed_plugin:
            raise UnsupportedError(
                "Other TrainingArguments were made after this Trainer; accelerate knows one configuration at a time.",
                "Make the arguments and the Trainer directly before each training.",
            )
        self._follow(trainer.args)
        checkpoint = self._checkpoint_for(trainer, resume)
        if any(known() is trainer for known in self._trained) and not resume:
            warnings.warn(
                "This Trainer trains once more, and the optimizer's state begins anew. To go on from the state that was"
                " saved last, pass resume_from_checkpoint=True.",
                stacklevel=2,
            )
        self._trained.append(weakref.ref(trainer))
        return checkpoint

    def _checkpoint_for(self, trainer: Trainer, resume: str | bool | None) -> str | bool | None:
        """Return the checkpoint to resume from, or a folder that stands for the training on storage. Collective."""
        output_dir, says = trainer.args.output_dir, trainer.is_world_process_zero()
        if resume == STORAGE_OR_NEW:
            self._fit_record.require_keeping(self._settings.transfer, what=f"train({_RESUME}={STORAGE_OR_NEW!r})")
            steps, fault = steps_of_checkpoints(output_dir, warn=says)
            start = choose_start(self._settings, steps, is_removed=self._settle_earlier(), places=[output_dir])
            if start.source is Source.NEW and fault is not None:
                raise fault
            if says:
                _log.warning("train(%s=%r): %s", _RESUME, STORAGE_OR_NEW, start.reason)
            resume = STORAGE if start.source is Source.STORAGE else start.checkpoint
        if resume == STORAGE:
            self._release_storage(f"a training of {type(trainer.model).__name__} that resumes from storage")
            return self._fit_record.prepare_resume(trainer, self._settings)
        return checkpoint_to_resume(resume, output_dir, warn=says)

    def _recorded(self, trainer: Trainer) -> AbstractContextManager[None]:
        def engine() -> SmartInfinityEngine:
            assert self._training_engine is not None
            return self._training_engine

        return RecordedTraining(trainer, self._fit_record, self._settings, engine).watched()

    def _end(self, completed: bool) -> None:
        self._become_idle(completed=completed)
        says = int(os.environ.get("RANK", "0")) == 0
        self._fit_record.end_fit(self._settings, self._rank_state, completed=completed, says=says)

    def _initialize(self, initialize: Callable[..., Any], **kwargs: Any) -> Any:
        """Build our engine for a call of ``deepspeed.initialize``, and return that call's results."""
        from lightning_smartinfinity.zero3.engine.build import evaluation_config, evaluation_engine, refuse_in_fit
        from lightning_smartinfinity.zero3.optimizer.release import release_module
        from lightning_smartinfinity.zero3.setup.validation import check_dtype

        config = kwargs.pop("config_params", None) or kwargs.pop("config", None) or {}
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        self._require_own(config, trained=optimizer is not None)
        refuse_quantized(model)
        self._choose_storage(Path.cwd())
        if optimizer is None:
            self._engine_config = config
            self._last_model = self._last_model or model  # save_pretrained saves the first model, not a reference model
            refuse_in_fit(model)
            check_dtype(model, config)
            self._begin_watch()
            release_module(model)
            with self._parameters_on_storage(model), evaluation_engine():
                return initialize(config=evaluation_config(config), **kwargs)
        self._refuse_second(model)
        self._last_model = model
        several = config["gradient_accumulation_steps"] > 1
        config = {**config, "data_types": data_types(self._settings.transfer, accumulates=several)}
        self._engine_config = config

        def build() -> tuple[Any, Any]:
            results = initialize(config=config, **kwargs)
            return results[0], (results[0], optimizer, *results[2:])

        _, results = self._build_engine(model, optimizer, build)
        # An evaluation by another Trainer must not take the model away from this training.
        results[0].optimizer.rank_state.in_fit = True
        return results

    def _has_fp32_in_memory(self, model: torch.nn.Module) -> bool:
        # transformers notes the dtype in which it loaded a model; bf16 and fp16 of its Trainer are mixed precisions.
        return getattr(getattr(model, "config", None), "dtype", None) in (None, torch.float32)

    def _refuse_second(self, model: torch.nn.Module) -> None:
        """Refuse to train a second model during a training; ``Trainer.train`` ends its own training itself."""
        from lightning_smartinfinity.zero3.optimizer.release import has_engine

        engine = self._training_engine
        if engine is None or engine.module is model or not engine.optimizer.rank_state.in_fit:
            return
        if has_engine(engine.module):
            raise UnsupportedError(
                f"{type(model).__name__} was given an optimizer while {type(engine.module).__name__} is being trained.",
                "One model trains at a time: put both into one module with one optimizer, or end the first training by "
                "accelerator.free_memory(). A model that is only called needs no optimizer.",
            )

    def _save_model(self, trainer: Trainer, folder: str, begins_checkpoint: bool, original: Callable[[], None]) -> None:
        """Write a model window by window, and let the Trainer write the other files, such as the tokenizer's."""
        from lightning_smartinfinity.zero3.ranks.collectives import raising_together

        if begins_checkpoint:
            with raising_together():
                if trainer.args.should_save:
                    self._checkpoint = Path(folder)
                    begin_checkpoint(folder, resumable=not trainer.args.save_only_model)
        if not _has_own_format(trainer.model):
            if trainer.deepspeed is None:
                raise UnsupportedError(
                    f"save_model was called before {type(trainer.model).__name__} was trained or evaluated.",
                    "Call Trainer.train or Trainer.evaluate first.",
                )
            with trainer.deepspeed.gathering_trained_only(has_adapters(trainer.model)):
                original()
            return
        self.save_pretrained(folder, trainer.model)
        with without_weights(trainer):
            original()

    def _end_checkpoint(self, output_dir: str) -> None:
        """Flush the saved checkpoint; all checkpoints if the Trainer overrides the saving of models."""
        checkpoint, self._checkpoint = self._checkpoint, None
        end_checkpoint(checkpoint or Path(output_dir))

    # ---- hooks of the base class

    @override
    def _module_to_save(self, module: torch.nn.Module | None) -> torch.nn.Module:
        if module is not None:
            return module
        if self._last_model is None:
            raise UnsupportedError(
                "save_pretrained was called before a training or an evaluation began.",
                "Call it after Trainer.train or Trainer.evaluate, or pass a module.",
            )
        return self._last_model

    def _require_own(self, config: DeepSpeedConfig, *, trained: bool = True) -> None:
        for section in ("optimizer", "scheduler"):
            if section in config:
                raise ConfigError(
                    f"DeepSpeed's configuration has a section {section!r}, and DeepSpeed would build its own.",
                    "Leave it out: transformers builds what TrainingArguments ask for.",
                )
        given, own = config.get("zero_optimization") or {}, self._config["zero_optimization"]
        if not trained and all(given.get(key) == own.get(key) for key in _PARTITIONING):
            return
        if given != own:
            raise ConfigError(
                "Within SmartInfinityTraining, transformers or accelerate was given another configuration of DeepSpeed:"
                f" zero_optimization={config.get('zero_optimization')!r}.",
                "Pass deepspeed=training.config, and what you want to change as SmartInfinityTraining(zero={...})."
                if trained
                else "Pass a copy of training.config, whose zero_optimization keeps stage and offload_param.",
            )


_ACTIVE: list[SmartInfinityTraining] = []


def _has_own_format(model: torch.nn.Module) -> bool:
    """Return whether the model is transformers' own class without adapters, not a user's module."""
    import transformers

    return isinstance(model, transformers.PreTrainedModel) and not has_adapters(model)

"""A context in which ``transformers.Trainer`` and Accelerate train with optimizer state that lies only on storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from typing_extensions import Self, override

from lightning_smartinfinity.compression import GradientCodec
from lightning_smartinfinity.config import (
    SmartSSDConfig,
    TransferConfig,
    smartssd_config,
    storage_folders,
    transfer_config,
)
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.huggingface.arguments import Arguments, check_arguments, job_of, refuse_quantized
from lightning_smartinfinity.huggingface.launch import launched
from lightning_smartinfinity.huggingface.seams import (
    Trainer,
    arguments_seen_by,
    fresh_accelerate,
    models_saved_by,
    trainings_ended_by,
    without_weights,
)
from lightning_smartinfinity.lightning_options import checked_options
from lightning_smartinfinity.near_storage import NearStorage
from lightning_smartinfinity.settings import StrategySettings, documents_settings
from lightning_smartinfinity.transformers_models import optional_package
from lightning_smartinfinity.zero3.untyped import DeepSpeedConfig

if TYPE_CHECKING:
    from lightning_smartinfinity.zero3.engine import PortableEngine

__all__ = ["SmartInfinityTraining"]

_AUTO: DeepSpeedConfig = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
_DEFAULT_JOB = TransferConfig().job


class _NoOptions(TypedDict):
    """There are no options beside the settings."""


@documents_settings
class SmartInfinityTraining(NearStorage):
    """A context for ``transformers.Trainer`` and Accelerate: what they train in it keeps its state on storage.

    Give :attr:`config` to ``TrainingArguments(deepspeed=...)`` before the model is loaded, so that ``from_pretrained``
    partitions it. Batch size, accumulation, clipping and precision are those of the arguments. When the context ends,
    the state is removed from storage, unless ``transfer`` keeps it.

    Raises:
        ConfigError: A setting is unknown, contradictory or out of range.
        UnsupportedError: A setting asks for something that this package does not support.

    Attributes:
        config: DeepSpeed's configuration, with "auto" where ``TrainingArguments`` or Accelerate know the value.

    Example::

        with SmartInfinityTraining(storage="/mnt/nvme") as training:
            args = TrainingArguments("finetuned", bf16=True, deepspeed=training.config)
            model = AutoModelForCausalLM.from_pretrained(folder)
            Trainer(model=model, args=args, train_dataset=dataset).train()
    """

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
        **unknown: Any,
    ) -> None:
        checked_options(type(self).__name__, unknown, _NoOptions)
        settings = StrategySettings(
            storage=storage_folders(storage),
            update_device=update_device,
            smartssd=smartssd_config(smartssd),
            state_format=state_format,
            overlap=overlap,
            compression=compression,
            activations=activations,
            transfer=transfer_config(transfer),
            zero=zero,
        )
        self._take_settings(settings)
        self.config = {**self.config, **_AUTO}
        self.config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        self._given = settings
        self._completed: DeepSpeedConfig | None = None
        self._contexts = ExitStack()

    # ---- the context

    def __enter__(self) -> Self:
        for package in ("transformers", "accelerate"):
            optional_package(package, purpose="SmartInfinityTraining")
        if _ACTIVE:
            raise UnsupportedError(
                "A SmartInfinityTraining began within another one.", "End the first one: trainings come one by one."
            )
        on_gpu = torch.cuda.is_available()
        if not on_gpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UnsupportedError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']}: on CPUs accelerate and DeepSpeed train in one process only.",
                "Start one process, or train in Lightning: Trainer(strategy='smart_infinity', devices=...).",
            )
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._prepare_environment(torch.device("cuda" if on_gpu else "cpu"), local_world_size=local_world_size)
        from lightning_smartinfinity.zero3.engine import initializing_with

        with ExitStack() as contexts:
            contexts.enter_context(launched())
            contexts.enter_context(fresh_accelerate())
            contexts.enter_context(arguments_seen_by(self._see_arguments))
            contexts.enter_context(models_saved_by(self._save_model))
            contexts.enter_context(trainings_ended_by(self._become_idle))
            contexts.enter_context(initializing_with(self._initialize))
            _ACTIVE.append(self)
            contexts.callback(_ACTIVE.remove, self)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._contexts:
            self._become_idle()
            self.close()

    # ---- what transformers and accelerate call

    def _see_arguments(self, config: DeepSpeedConfig, args: Arguments) -> None:
        """Check new ``TrainingArguments``, and put the storage where they put their checkpoints."""
        self._require_own(config)
        check_arguments(args)
        self._completed = config
        self._settings = self._given
        if self._given.storage is None:
            self._choose_storage(args.output_dir)
        elif self._given.transfer.job == _DEFAULT_JOB:
            self._settings = replace(self._given, transfer=replace(self._given.transfer, job=job_of(args.output_dir)))
        self._contexts.enter_context(self._parameters_on_storage())

    def _initialize(self, initialize: Callable[..., Any], **kwargs: Any) -> Any:
        """Build our engine for a call of ``deepspeed.initialize``, and return what that returns."""
        from lightning_smartinfinity.zero3.engine import evaluation_engine, refuse_in_fit
        from lightning_smartinfinity.zero3.release import release_module
        from lightning_smartinfinity.zero3.validation import check_dtype

        config = kwargs.pop("config_params", None) or kwargs.pop("config", None) or {}
        self._require_own(config)
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        refuse_quantized(model)
        # Several micro-batches accumulate in fp32, also with 16-bit parameters.
        several = config["gradient_accumulation_steps"] > 1
        config = {**config, "data_types": {"grad_accum_dtype": "fp32"} if several else {}}
        self._completed = config
        self._choose_storage(Path.cwd())
        if optimizer is None:
            refuse_in_fit(model)
            check_dtype(model, config)
            release_module(model)
            with self._parameters_on_storage(), evaluation_engine():
                return initialize(config=config, **kwargs)

        def build() -> tuple[Any, Any]:
            results = initialize(config=config, **kwargs)
            return results[0], results

        _, results = self._build_engine(model, optimizer, build)
        # An evaluation by another Trainer would take the model away from this training.
        results[0].optimizer.rank_state.in_fit = True
        return results

    def _save_model(self, trainer: Trainer, folder: str, original: Callable[[], None]) -> None:
        """Write a model window by window, and let the Trainer write what belongs to it, such as the tokenizer."""
        engine: PortableEngine | None = trainer.model_wrapped if trainer.model_wrapped is not trainer.model else None
        if engine is None or not _has_own_format(trainer.model):
            original()
            return
        self.save_pretrained(folder, trainer.model)
        with without_weights(trainer.model), engine.without_state_dict():
            original()

    # ---- the base class's questions

    @property
    @override
    def _engine_config(self) -> DeepSpeedConfig:
        return self.config if self._completed is None else self._completed

    @override
    def _module_to_save(self, module: torch.nn.Module | None) -> torch.nn.Module:
        if module is not None:
            return module
        if self._training_engine is None:
            raise UnsupportedError(
                "save_pretrained was called before a training began.", "Call it after Trainer.train, or pass a module."
            )
        return self._training_engine.module

    def _require_own(self, config: DeepSpeedConfig) -> None:
        for section in ("optimizer", "scheduler"):
            if section in config:
                raise ConfigError(
                    f"DeepSpeed's configuration has a section {section!r}, and DeepSpeed would build its own.",
                    "Leave it out: transformers builds what TrainingArguments ask for.",
                )
        if config.get("zero_optimization") != self.config["zero_optimization"]:
            raise ConfigError(
                "Within SmartInfinityTraining, transformers or accelerate was given another configuration of DeepSpeed:"
                f" zero_optimization={config.get('zero_optimization')!r}.",
                "Pass deepspeed=training.config, and what you want to change as SmartInfinityTraining(zero={...}).",
            )


_ACTIVE: list[SmartInfinityTraining] = []


def _has_own_format(model: torch.nn.Module) -> bool:
    """Return whether the model is one of transformers itself, not one that peft has wrapped, nor the user's own."""
    import transformers

    return isinstance(model, transformers.PreTrainedModel) and not getattr(model, "_hf_peft_config_loaded", False)

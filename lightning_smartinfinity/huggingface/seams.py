"""The places of transformers that a training replaces while it lasts. docs/seams.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from lightning_smartinfinity.huggingface.arguments import Arguments

__all__ = [
    "Trainer",
    "arguments_seen_by",
    "fresh_accelerate",
    "models_saved_by",
    "trainings_ended_by",
    "without_weights",
]

Trainer: TypeAlias = Any
"""``transformers.Trainer``; transformers is an optional dependency."""


@contextmanager
def arguments_seen_by(see: Callable[[dict[str, Any], Arguments], None]) -> Iterator[None]:
    """Call a function whenever ``TrainingArguments`` complete DeepSpeed's configuration within this context.

    After it, transformers forgets the configuration, by which ``from_pretrained`` partitions models.

    Args:
        see: Function that takes the completed configuration and the arguments.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    def process(original: Callable[..., None], config: Any, args: Arguments, *rest: object, **named: object) -> None:
        original(config, args, *rest, **named)
        see(config.config, args)

    try:
        with _replaced(HfTrainerDeepSpeedConfig, "trainer_config_process", process):
            yield
    finally:
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Let accelerate forget its plugins and its devices before and after this context, as ``TrainingArguments`` do.

    It keeps them in its classes, and would refuse another configuration of DeepSpeed in the same process.
    """
    _forget_state()
    try:
        yield
    finally:
        _forget_state()


def _forget_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def models_saved_by(save: Callable[[Trainer, str, Callable[[], None]], None]) -> Iterator[None]:
    """Let a function save models in place of ``Trainer.save_model`` within this context.

    Args:
        save: Function that takes the Trainer, the folder, and a function that calls the original.
    """
    import transformers

    def save_model(
        original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, *rest: object, **named: object
    ) -> None:
        folder = trainer.args.output_dir if output_dir is None else output_dir
        save(trainer, folder, lambda: original(trainer, output_dir, *rest, **named))

    with _replaced(transformers.Trainer, "save_model", save_model):
        yield


@contextmanager
def trainings_ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever ``Trainer.train`` ends within this context.

    The Trainer also builds an engine for every training. Otherwise it would take the one of an evaluation before it,
    which has no optimizer and which it has released by then.

    Args:
        end: Function that is called after success and failure.
    """
    import transformers

    def train(original: Callable[..., Any], trainer: Trainer, *args: object, **kwargs: object) -> Any:
        trainer.model_wrapped = trainer.model
        try:
            return original(trainer, *args, **kwargs)
        finally:
            end()

    with _replaced(transformers.Trainer, "train", train):
        yield


@contextmanager
def without_weights(model: Any) -> Iterator[None]:
    """Let ``save_pretrained`` of this model write nothing: its weights and its configuration are written already."""
    model.save_pretrained = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del model.save_pretrained


@contextmanager
def _replaced(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Redirect a method to ``around``, which takes the original as its first argument."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)

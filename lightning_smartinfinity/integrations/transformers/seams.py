"""Seams of transformers: the functions that a training replaces while it lasts. docs/seams.md lists them."""

from __future__ import annotations

import copy
import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.transformers.arguments import Arguments

__all__ = [
    "Trainer",
    "accelerators_with_deepspeed",
    "arguments_seen_by",
    "completed_checkpoints_seen_by",
    "fresh_accelerate",
    "models_saved_by",
    "random_states_seen_by",
    "steps_taken_by_optimizers",
    "trainers_of_context",
    "trainings_seen_by",
    "without_weights",
]

Trainer: TypeAlias = Any
"""``transformers.Trainer``; transformers is an optional dependency."""


@contextmanager
def arguments_seen_by(see: Callable[[dict[str, Any], dict[str, Any], Arguments], None]) -> Iterator[None]:
    """Call a function whenever ``TrainingArguments`` complete DeepSpeed's configuration within this context.

    When the context ends, transformers forgets the configuration, which makes ``from_pretrained`` partition models.

    Args:
        see: Function that takes the given configuration, the completed one, and the arguments.
    """
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    def build(original: Callable[..., None], config: Any, given: object) -> None:
        if not isinstance(given, dict):
            raise ConfigError(
                f"TrainingArguments(deepspeed={given!r}) was made within SmartInfinityTraining.",
                "Pass deepspeed=training.config, where `training` is what `with SmartInfinityTraining(...) as training`"
                " names.",
            )
        original(config, given)

    def process(original: Callable[..., None], config: Any, args: Arguments, *rest: object, **named: object) -> None:
        # `original` replaces values such as "auto" in place.
        given = copy.deepcopy(config.config)
        original(config, args, *rest, **named)
        see(given, config.config, args)

    try:
        with (
            wrapped(HfTrainerDeepSpeedConfig, "__init__", build),
            wrapped(HfTrainerDeepSpeedConfig, "trainer_config_process", process),
        ):
            yield
    finally:
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's plugins and devices before and after this context, as ``TrainingArguments`` do.

    accelerate stores them in class attributes, and would refuse another configuration of DeepSpeed in the same process.
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
def accelerators_with_deepspeed(
    begin_save: Callable[[str], None], end_save: Callable[[str, int, bool], None], begin_load: Callable[[str], None]
) -> Iterator[None]:
    """Refuse an Accelerator without DeepSpeed in this context, also a Trainer's: it would train in memory.

    Call functions when the others save and load their state.

    Args:
        begin_save: Function that takes the folder before accelerate writes its own files.
        end_save: Function that takes the folder, the rank, and whether this rank writes files that are for all ranks.
        begin_load: Function that takes the folder before accelerate reads its own files.
    """
    import accelerate

    def build(original: Callable[..., None], accelerator: Any, *args: object, **kwargs: object) -> None:
        original(accelerator, *args, **kwargs)
        if accelerator.distributed_type != accelerate.DistributedType.DEEPSPEED:
            raise UnsupportedError(
                "A Trainer or an Accelerator without DeepSpeed was made within SmartInfinityTraining; it would train in"
                " memory.",
                "Pass TrainingArguments(deepspeed=training.config), or"
                " Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=training.config)).",
            )
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: begin_save(folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: begin_load(folder))

    def save(original: Callable[..., Any], accelerator: Any, *args: object, **kwargs: object) -> Any:
        folder = original(accelerator, *args, **kwargs)
        on_each_node = accelerator.project_configuration.save_on_each_node
        writes = accelerator.is_local_main_process if on_each_node else accelerator.is_main_process
        end_save(str(folder), accelerator.process_index, writes)
        return folder

    with wrapped(accelerate.Accelerator, "__init__", build), wrapped(accelerate.Accelerator, "save_state", save):
        yield


@contextmanager
def steps_taken_by_optimizers() -> Iterator[None]:
    """Make accelerate's optimizers step and zero gradients within this context, as they do in memory.

    With DeepSpeed, ``Accelerator.backward`` includes the step, and both methods of these optimizers do nothing.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

    def backward(original: Callable[..., None], wrapper: Any, *args: object, **kwargs: object) -> None:
        with replaced(wrapper.engine, "step", lambda: None):
            original(wrapper, *args, **kwargs)

    with (
        wrapped(DeepSpeedEngineWrapper, "backward", backward),
        replaced(DeepSpeedOptimizerWrapper, "step", AcceleratedOptimizer.step),
        replaced(DeepSpeedOptimizerWrapper, "zero_grad", AcceleratedOptimizer.zero_grad),
    ):
        yield


@contextmanager
def models_saved_by(save: Callable[[Trainer, str, bool, Callable[[], None]], None]) -> Iterator[None]:
    """Replace ``Trainer.save_model`` by a function within this context.

    Args:
        save: Function that takes the Trainer, the folder, whether the call is the start of a checkpoint, and a function
            that calls the original.
    """
    import transformers

    def save_model(
        original: Callable[..., None], trainer: Trainer, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        folder = trainer.args.output_dir if output_dir is None else output_dir
        save(trainer, folder, _internal_call, lambda: original(trainer, output_dir, _internal_call))

    with wrapped(transformers.Trainer, "save_model", save_model):
        yield


@contextmanager
def completed_checkpoints_seen_by(see: Callable[[str], None]) -> Iterator[None]:
    """Call a function after all files of a checkpoint are written, before older checkpoints are removed.

    Args:
        see: Function that takes the folder that contains the checkpoints.
    """
    from transformers import trainer

    def rotate(original: Callable[..., None], output_dir: str, *args: object, **kwargs: object) -> None:
        see(output_dir)
        original(output_dir, *args, **kwargs)

    with wrapped(trainer, "rotate_checkpoints", rotate):
        yield


@contextmanager
def random_states_seen_by(see: Callable[[str], None]) -> Iterator[None]:
    """Call a function on every rank, with several ranks, after the rank has saved its random states.

    Args:
        see: Function that takes the path of the rank's file.
    """
    import transformers

    def save(original: Callable[..., None], trainer: Trainer, output_dir: str) -> None:
        original(trainer, output_dir)
        if trainer.args.world_size > 1:
            see(os.path.join(output_dir, f"rng_state_{trainer.args.process_index}.pth"))

    with wrapped(transformers.Trainer, "_save_rng_state", save):
        yield


@contextmanager
def trainings_seen_by(
    begin: Callable[[Trainer, Any], Any],
    during: Callable[[Trainer], AbstractContextManager[None]],
    end: Callable[[bool], None],
) -> Iterator[None]:
    """Call functions when ``Trainer.train`` begins and ends within this context.

    Also makes the Trainer build a new engine for every training. Otherwise it would reuse the engine of an earlier
    evaluation, which has no optimizer and is released by then.

    Args:
        begin: Function that takes the Trainer and ``resume_from_checkpoint``, and returns the checkpoint to resume
            from.
        during: Function that takes the Trainer, and returns a context for the training.
        end: Function that is called after success and after failure, and takes whether it was success.
    """
    import transformers

    def train(
        original: Callable[..., Any],
        trainer: Trainer,
        resume_from_checkpoint: str | bool | None = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        trainer.model_wrapped = trainer.model
        _keep_given(trainer)
        completed = False
        try:
            resume_from_checkpoint = begin(trainer, resume_from_checkpoint)
            with _losses_and_clipping_of(trainer), during(trainer):
                result = original(trainer, resume_from_checkpoint, *args, **kwargs)
            completed = True
            return result
        finally:
            end(completed)

    with wrapped(transformers.Trainer, "train", train):
        yield


@contextmanager
def _losses_and_clipping_of(trainer: Trainer) -> Iterator[None]:
    """Leave dividing losses to the Trainer, and show its callbacks clipped gradients, as in memory.

    DeepSpeed would divide the loss a second time in code that calls ``trainer.accelerator.backward``. The step clips
    gradients while it streams them, so callbacks would see them unclipped. Gradients that are clipped here for a
    callback are not clipped again by the step.
    """
    from transformers import TrainerCallback

    from lightning_smartinfinity.zero3.optimizer.clipping import clip_norm

    handler = trainer.callback_handler

    def backward(original: Callable[..., None], loss: torch.Tensor, **kwargs: object) -> None:
        original(loss, **{"scale_wrt_gas": False, **kwargs})

    def call(original: Callable[..., Any], *args: object) -> Any:
        optimizer = trainer.deepspeed.optimizer
        looks = (
            type(each).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step for each in handler.callbacks
        )
        if optimizer.clip_grad > 0 and any(looks):  # else the step clips, which costs less
            clip_norm(optimizer, optimizer.clip_grad)
            optimizer.is_clipped = True
        return original(*args)

    with wrapped(trainer.accelerator, "backward", backward), wrapped(handler, "on_pre_optimizer_step", call):
        yield


_AFTER_IT = {"save_model": "SmartInfinityTraining.save_pretrained(folder) still saves the model that was trained."}


@contextmanager
def trainers_of_context() -> Iterator[None]:
    """Make Trainers that were created within this context refuse work after it.

    They would save and train without this package, or fail on accelerate's reset state.
    """
    import transformers

    made: list[weakref.ref[Trainer]] = []  # weak references, and a list: a subclass that defines == has no hash
    patches = ExitStack()

    def build(original: Callable[..., None], trainer: Trainer, *args: object, **kwargs: object) -> None:
        try:
            original(trainer, *args, **kwargs)
        except NotImplementedError as error:
            if "deepspeed_plugin" not in str(error):
                raise
            raise UnsupportedError(
                "A second Trainer was made without TrainingArguments of its own, made directly before it.",
                "Make new TrainingArguments for each Trainer: accelerate knows one configuration at a time.",
            ) from error
        made.append(weakref.ref(trainer))
        patches.enter_context(_hashing_weights(type(trainer)))

    try:
        with patches, wrapped(transformers.Trainer, "__init__", build):
            yield
    finally:
        for trainer in [trainer for known in made if (trainer := known()) is not None]:
            for name in ("train", "evaluate", "predict", "save_model"):
                setattr(trainer, name, _refused_after(name))


def _keep_given(trainer: Trainer) -> None:
    """Make a Trainer train with the optimizer and the scheduler that its user passed, assigned or created.

    With DeepSpeed, the Trainer drops them and builds others from its arguments. Those that the Trainer wrapped or
    created itself belong to an earlier training, and are not kept.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    def keep(method: str, name: str) -> None:
        given, build = getattr(trainer, name), getattr(trainer, method)

        def created(*args: Any, **kwargs: Any) -> Any:
            if getattr(trainer, name) is None:
                setattr(trainer, name, given)
            return build(*args, **kwargs)

        setattr(trainer, method, created)

    if trainer.optimizer is not None and not isinstance(trainer.optimizer, AcceleratedOptimizer):
        keep("create_optimizer", "optimizer")
    scheduler = trainer.lr_scheduler
    if scheduler is not None and not isinstance(scheduler, AcceleratedScheduler) and not trainer._created_lr_scheduler:
        keep("create_scheduler", "lr_scheduler")


@contextmanager
def _hashing_weights(trainer_class: type) -> Iterator[None]:
    """Make TRL hash weights, not ZeRO-3's empty tensors: the hash is the key of its precomputed log-probabilities."""
    modules = {sys.modules[each.__module__] for each in trainer_class.__mro__}
    with ExitStack() as patches:
        for module in modules:
            if hasattr(module, "hash_module"):
                patches.enter_context(replaced(module, "hash_module", _hash_of_weights))
        yield


def _hash_of_weights(model: torch.nn.Module) -> str:
    from lightning_smartinfinity.zero3.checkpoints.save.live_weights import LiveWeights

    digest, weights = hashlib.sha256(), LiveWeights(model)

    def add(name: str, first: int, values: torch.Tensor) -> None:
        digest.update(f"{name} {first} {values.dtype}".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())

    weights.read(weights.contents.parameters, add, masters=False)
    for name, value in weights.contents.buffers.items():
        add(name, 0, value)
    return digest.hexdigest()


def _refused_after(name: str) -> Callable[..., Any]:
    def refused(*_: object, **__: object) -> Any:
        raise UnsupportedError(
            f"Trainer.{name} was called after its SmartInfinityTraining had ended.",
            f"Call it within the `with`. {_AFTER_IT.get(name, '')}".rstrip(),
        )

    return refused


@contextmanager
def without_weights(trainer: Trainer) -> Iterator[None]:
    """Make ``Trainer.save_model`` skip the weights and the model's configuration, which are written already."""
    deepspeed = trainer.is_deepspeed_enabled
    trainer.is_deepspeed_enabled = False  # else it asks its engine for a state dict of the whole model
    trainer.model.save_pretrained = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del trainer.model.save_pretrained
        trainer.is_deepspeed_enabled = deepspeed

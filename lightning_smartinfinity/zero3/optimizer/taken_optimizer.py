"""The user's torch optimizer while a training has its state on storage.

It stays the object that the user has made, and every entry point returns it: schedulers, hooks and references keep
working. Each method of ``torch.optim.Optimizer`` does here what it does in memory, or raises an error. So do steps of
other torch optimizers on parameters that ZeRO-3 has partitioned: their update would be lost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NoReturn

import torch
from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.untyped import ParamGroup, ZeroEngine

__all__ = [
    "TakenOptimizer",
    "check_takeable",
    "has_step_hooks",
    "refuse_foreign_steps",
    "take_over",
    "with_step_hooks",
]


_STATE_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
_SAVE = (
    "Save and load checkpoints: trainer.save_checkpoint(path) and fit(ckpt_path=path); fabric.save and fabric.load of "
    "{'model': model, 'optimizer': optimizer}; or transformers' save_steps and resume_from_checkpoint."
)


def take_over(optimizer: torch.optim.Optimizer, engine: ZeroEngine) -> None:
    """Turn the user's optimizer into a :class:`TakenOptimizer` of the same name, whose steps the engine takes."""
    own = vars(optimizer)
    own.pop("step", None)  # a wrapper set by torch's schedulers
    del own["state"]
    own["_engine"] = weakref.ref(engine)
    own["state_on_storage"] = _StateOnStorage(type(optimizer).__name__, own["_engine"])
    kind: Any = type(optimizer)
    optimizer.__class__ = _taken(kind)


def check_takeable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that another training uses, or whose replaced methods or hooks the engine would not call.

    Raises:
        UnsupportedError: The optimizer was taken over before, has a method replaced on the object, or has hooks of its
            state dict.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, TakenOptimizer):
        raise UnsupportedError(
            f"This {name} was used by an earlier training, which has its state on storage.",
            "Make a new optimizer for each training: build it in configure_optimizers, or before each fabric.setup.",
        )
    for method, own in vars(optimizer).items():
        original = getattr(type(optimizer), method, None)
        # Allow the wrapper that torch's schedulers put around step; it has the original as __wrapped__.
        if callable(original) and getattr(own, "__wrapped__", own) is not original:
            raise UnsupportedError(
                f"{name}.{method} was replaced on the object; with the smart_infinity strategy it would not be called.",
                "Use register_step_pre_hook and register_step_post_hook instead.",
            )
    for kind in _STATE_HOOKS:
        if getattr(optimizer, f"_optimizer_{kind}_hooks"):
            raise _without_state_dict(f"{name} has a hook of register_{kind}_hook, which")


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a user's hook runs before the optimizer's step, and could change the step."""
    others = (hook for hook in torch_optimizer._global_optimizer_pre_hooks.values() if hook.__module__ not in _OURS)
    return bool(optimizer._optimizer_step_pre_hooks) or any(others)


_OURS = frozenset({"lightning_smartinfinity.zero3.optimizer.taken_optimizer"})


def with_step_hooks(optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
    """Call ``update`` between the step's pre-hooks and post-hooks (the optimizer's and torch's global ones)."""
    torch.optim.Optimizer.profile_hook_step(lambda _: update())(optimizer)


class TakenOptimizer(torch.optim.Optimizer):
    """The user's optimizer after :func:`take_over`; unknown attributes are looked up on DeepSpeed's optimizer."""

    # Wrappers of Lightning and Fabric derive from this class, and get only instance attributes from the optimizer.

    @property
    def engine(self) -> ZeroEngine:
        """The engine that takes the steps."""
        engine: ZeroEngine | None = self._engine()
        if engine is None:
            raise UnsupportedError(
                f"The training of this {type(self).__name__} is over, and its engine no longer exists.",
                "Make a new optimizer for each training.",
            )
        return engine

    @property
    def state(self) -> Any:
        """A placeholder for the optimizer state; see :class:`_StateOnStorage`."""
        return self.state_on_storage

    @state.setter
    def state(self, state: object) -> NoReturn:
        raise _on_storage(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        engine = None if name.startswith("__") or "_engine" not in vars(self) else self._engine()
        if engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(engine.optimizer, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from the gradients of every backward since the last step or ``zero_grad``.

        Args:
            closure: Function called first; it runs forward and backward and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.step()
        return loss

    # Keeps schedulers from wrapping the step, and from warning that it is not wrapped; the engine records the calls.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self.engine.optimizer.zero_grad_as_torch(set_to_none)

    def state_dict(self) -> NoReturn:
        """Raise UnsupportedError: the state is on storage, and no rank has all of it."""
        raise _without_state_dict("optimizer.state_dict()")

    def load_state_dict(self, state_dict: ParamGroup) -> NoReturn:
        """Raise UnsupportedError, as :meth:`state_dict` does."""
        raise _without_state_dict("optimizer.load_state_dict()")

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError, as :meth:`state_dict` does."""
        raise _without_state_dict("A hook of optimizer.state_dict()")

    def register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError, as :meth:`state_dict` does."""
        raise _without_state_dict("A hook of optimizer.load_state_dict()")

    register_state_dict_post_hook = register_state_dict_pre_hook
    register_load_state_dict_post_hook = register_load_state_dict_pre_hook

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Raise UnsupportedError: the layout of the state on storage is fixed."""
        raise UnsupportedError(
            "add_param_group does not work in mid-training with the smart_infinity strategy.",
            "Give the optimizer every parameter group when you make it, and freeze what is to be trained later in "
            "on_fit_start, or after fabric.setup.",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise UnsupportedError: a copy would have neither the state nor the engine."""
        raise _without_state_dict("Copying or pickling the optimizer")


class _StateOnStorage(MutableMapping[torch.Tensor, Any]):
    """``optimizer.state``: empty before the first step; afterwards, every access raises UnsupportedError."""

    def __init__(self, name: str, engine: weakref.ref[ZeroEngine]) -> None:
        self._name, self._engine = name, engine

    def _require_none(self) -> None:
        engine = self._engine()
        if engine is not None and engine.global_steps > 0:
            raise _on_storage(self._name)

    def __getitem__(self, param: torch.Tensor) -> NoReturn:
        raise _on_storage(self._name)

    def __setitem__(self, param: torch.Tensor, value: object) -> NoReturn:
        raise _on_storage(self._name)

    def __delitem__(self, param: torch.Tensor) -> NoReturn:
        raise _on_storage(self._name)

    def __contains__(self, param: object) -> bool:
        self._require_none()
        return False

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._require_none()
        return iter(())

    def __len__(self) -> int:
        self._require_none()
        return 0


@functools.cache
def _taken(kind: Any) -> type[TakenOptimizer]:
    return type(kind.__name__, (TakenOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _on_storage(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}.state was read or written: with the smart_infinity strategy the optimizer state is on storage.",
        "Call deepspeed.utils.safe_get_full_optimizer_state(parameter, 'exp_avg') or safe_set_full_optimizer_state on "
        "every rank.",
    )


def _without_state_dict(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} does not work with the smart_infinity strategy: no rank has the whole optimizer state, which is on "
        "storage.",
        _SAVE,
    )


# For each optimizer found without partitioned parameters: the numbers of engines and of its parameters at that time.
_ACCEPTED: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_num_engines = 0


def refuse_foreign_steps() -> None:
    """Make ``step`` of every optimizer in this process raise on partitioned parameters, except ours.

    Every engine calls this before it partitions parameters, as other optimizers may hold some of them.
    """
    global _num_engines
    _num_engines += 1
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    if isinstance(optimizer, TakenOptimizer):
        return
    looks = (_num_engines, sum(len(group["params"]) for group in optimizer.param_groups))
    if _ACCEPTED.get(optimizer) != looks:
        _refuse_partitioned(optimizer)
        if not any(hasattr(param, "ds_status") for group in optimizer.param_groups for param in group["params"]):
            _ACCEPTED[optimizer] = looks


def _refuse_partitioned(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            # A parameter that happens to be gathered loses its update when it is partitioned again. The flat partitions
            # that stock DeepSpeed steps have an id, but no status.
            if hasattr(param, "ds_status") and not getattr(param, DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, 0):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step() found a parameter of shape {tuple(param.ds_shape)} that ZeRO-3 "
                    "has partitioned: its module was set up by a smart_infinity strategy before, or is a copy of one "
                    "that was.",
                    "Go on with such a strategy, or build the module anew and load a checkpoint's weights.",
                )

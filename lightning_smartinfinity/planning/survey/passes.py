"""Counts the memory and the operations of a forward and backward on fake tensors, which have sizes but no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_smartinfinity.common.transformers_models import models_in
from lightning_smartinfinity.planning.model import Passes
from lightning_smartinfinity.storage.io.os_errors import in_short

__all__ = ["UNCOUNTED", "count_passes", "loss_of", "transformer_in"]

UNCOUNTED = "activations and time were not counted"
"""Beginning of a text that explains why there are no passes."""


def count_passes(module: nn.Module, *, batch: int, seq: int) -> tuple[Passes | None, str]:
    """Run a module of fake parameters forward and backward.

    Only transformers models that take ``input_ids`` can be run, or modules that contain exactly one such model.

    Args:
        module: Module that was built within a ``FakeTensorMode``, which is still active.
        batch: Number of sequences.
        seq: Tokens of a sequence.

    Returns:
        The passes and an empty text; or None and a text that explains why.
    """
    model = transformer_in(module)
    if model is None:
        return None, f"{UNCOUNTED}: the module holds no model of transformers, or several"
    model.train()
    # The cache of keys and values is only for generation, and with activation checkpoints transformers warns about it.
    for config in {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values():
        if hasattr(config, "use_cache"):
            config.use_cache = False
    try:
        kept = _kept_bytes(model, batch=batch, seq=seq)
        return _counted(model, batch=batch, seq=seq, kept=kept), ""
    except Exception as error:  # a model's own code may raise anything on tensors without values
        return None, f"{UNCOUNTED}: {in_short(error)}"


def transformer_in(module: nn.Module) -> Any:
    """Return the only outermost transformers model in a module; None if there is none, or several."""
    found = list(models_in(module).values())
    return found[0] if len(found) == 1 else None


def loss_of(model: Any, *, batch: int, seq: int, device: str = "cpu") -> torch.Tensor:
    """Return the loss of a transformers model on zeros, or the sum of its first output if it has no loss."""
    tokens = torch.zeros((batch, seq), dtype=torch.long, device=device)
    if "ForSequenceClassification" in type(model).__name__:
        labels = tokens[:, 0].contiguous()
    elif any(kind in type(model).__name__ for kind in ("LM", "TokenClassification", "ForConditionalGeneration")):
        labels = tokens
    else:
        first: torch.Tensor = model(input_ids=tokens)[0]
        return first.float().sum()
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _kept_bytes(model: Any, *, batch: int, seq: int) -> int:
    """Return the bytes that forward saves for backward with activation checkpoints; -1 if there are none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return -1
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, "preserve_rng_state": False})
    try:
        live = _LiveBytes(model, vocab=_vocab(model))
        with live:
            loss = loss_of(model, batch=batch, seq=seq)
            kept = live.now
        del loss
    finally:
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    return kept


def _counted(model: Any, *, batch: int, seq: int, kept: int) -> Passes:
    live, flops = _LiveBytes(model, vocab=_vocab(model)), FlopCounterMode(display=False, custom_mapping=_ON_CPU)
    hooks = [
        param.register_post_accumulate_grad_hook(_drop_gradient) for param in model.parameters() if param.requires_grad
    ]
    try:
        with flops, live:
            loss = loss_of(model, batch=batch, seq=seq)
            saved, forward = live.now, flops.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return Passes(
        batch=batch,
        seq=seq,
        saved_bytes=saved,
        kept_bytes=saved if kept < 0 else kept,
        peak_bytes=live.peak,
        logits_bytes=live.logits_at_peak,
        forward_flops=float(forward),
        backward_flops=float(flops.get_total_flops() - forward),
        item_bytes=next(model.parameters()).itemsize,
    )


def _drop_gradient(param: torch.Tensor) -> None:
    # As in training, where a complete gradient is moved to the arena at once.
    param.grad = None


def _vocab(model: Any) -> int:
    return int(getattr(model.config, "vocab_size", 0) or 0)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own types are incomplete
    """Tracks the bytes of all tensors that operations create, until they are freed.

    Args:
        model: Model whose parameters and buffers do not count.
        vocab: Size of the vocabulary; tensors of two or more dimensions with this last dimension are logits.

    Attributes:
        now: Bytes allocated now.
        peak: Most bytes allocated at once.
        logits_at_peak: Bytes of logits at the peak.
    """

    def __init__(self, model: nn.Module, *, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.logits_at_peak = 0
        self._logits, self._vocab = 0, vocab
        held: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers())
        self._seen = weakref.WeakSet([tensor.untyped_storage() for tensor in held])
        self._not_logits = {tuple(param.shape) for param in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result):
            self._saw(tensor)
        return result

    def _saw(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        nbytes, of_logits = storage.nbytes(), self._is_logits(tensor)
        self._add(nbytes, of_logits)
        weakref.finalize(storage, self._add, -nbytes, of_logits)

    def _is_logits(self, tensor: torch.Tensor) -> bool:
        return (
            self._vocab > 0
            and tensor.dim() > 1
            and tensor.shape[-1] == self._vocab
            and (tuple(tensor.shape) not in self._not_logits)
        )

    def _add(self, nbytes: int, of_logits: bool) -> None:
        self.now += nbytes
        self._logits += nbytes if of_logits else 0
        if self.now > self.peak:
            self.peak, self.logits_at_peak = self.now, self._logits


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from _tensors_in(each)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


# torch counts attention's operations on a GPU only.
_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

"""The figures of a model in a plan: sizes of its parameters, and the bytes and FLOPs of a forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

__all__ = ["LlamaShape", "ModelFigures", "Passes", "llama_shape"]

_VOCAB = 32_000
_WIDTH_PER_LAYER = 128  # of Llama 7B (32 x 4096) and 13B (40 x 5120)
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The memory and operations of one forward and backward of a micro-batch, without activation checkpoints.

    Args:
        batch: Sequences of the micro-batch.
        seq: Tokens of a sequence.
        saved_bytes: Bytes that forward saves for backward.
        kept_bytes: ``saved_bytes`` with activation checkpoints, which keep only the inputs of layers.
        peak_bytes: Peak of allocated bytes, without parameters, but with gradients in flight.
        logits_bytes: Part of ``peak_bytes`` that grows with the vocabulary: logits, their fp32 copies and gradients.
        forward_flops: Floating-point operations of forward.
        backward_flops: Floating-point operations of backward.
        item_bytes: Bytes per element of the parameters and most activations: 2 or 4.
        counted: Whether the figures come from a run over fake tensors; False if they come from formulas.
    """

    batch: int
    seq: int
    saved_bytes: int
    kept_bytes: int
    peak_bytes: int
    logits_bytes: int
    forward_flops: float
    backward_flops: float
    item_bytes: int = 2
    counted: bool = True

    def of_batch(self, batch: int) -> Passes:
        """Return the passes scaled to another number of sequences, as if all figures were proportional to it."""
        scale = batch / self.batch
        return replace(
            self,
            batch=batch,
            saved_bytes=int(self.saved_bytes * scale),
            kept_bytes=int(self.kept_bytes * scale),
            peak_bytes=int(self.peak_bytes * scale),
            logits_bytes=int(self.logits_bytes * scale),
            forward_flops=self.forward_flops * scale,
            backward_flops=self.backward_flops * scale,
        )

    def activation_bytes(self, *, checkpointing: bool, num_layers: int) -> int:
        """Return the peak of allocated bytes, without parameters and logits.

        With activation checkpoints it consists of the inputs of all layers, and the larger of two: one layer's
        recomputed activations, or the bytes beyond the saved ones at the peak without checkpoints.
        """
        if not checkpointing:
            return self.peak_bytes - self.logits_bytes
        of_layer = max(0, self.saved_bytes - self.kept_bytes) // max(1, num_layers)
        beyond = max(0, self.peak_bytes - self.saved_bytes)
        return max(0, self.kept_bytes + max(of_layer, beyond) - self.logits_bytes)

    def recomputed_flops(self, *, checkpointing: bool) -> float:
        """Return the operations of backward, which repeats forward with activation checkpoints."""
        return self.backward_flops + (self.forward_flops if checkpointing else 0.0)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """The sizes of a model.

    Args:
        name: Display name.
        trained: Number of elements of each trained parameter, in the model's order; tied ones count once.
        frozen: Number of elements of each parameter that is not trained.
        buffer_bytes: Bytes of buffers.
        num_layers: Number of repeated layers; 1 if unknown.
        largest_module: Largest number of elements that one module holds directly.
        passes: Bytes and operations of a forward and backward; None if they could not be counted.
        count: Counts the passes for another number of sequences; None if all figures are proportional to it.
        checkpointing: Whether the model itself enables activation checkpoints.
        assumed: Assumptions about the model, in words; empty if there are none.
    """

    name: str
    trained: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    buffer_bytes: int = 0
    num_layers: int = 1
    largest_module: int = 0
    passes: Passes | None = None
    count: Callable[[int], Passes | None] | None = None
    checkpointing: bool = False
    assumed: str = ""

    def passes_of(self, batch: int) -> Passes | None:
        """Return the passes of a micro-batch of ``batch`` sequences; None if they cannot be counted."""
        if self.passes is None or batch == self.passes.batch:
            return self.passes
        return self.passes.of_batch(batch) if self.count is None else self.count(batch)

    @cached_property
    def trained_numel(self) -> int:
        """Elements that are trained."""
        return sum(self.trained)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.trained_numel + sum(self.frozen)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((*self.trained, *self.frozen), default=0)


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The shape of a decoder such as Llama's, with untied embeddings and as many key heads as query heads.

    Args:
        layers: Number of layers.
        width: Width of the residual stream.
        inner: Width inside the feed-forward part.
        heads: Number of attention heads.
        vocab: Number of tokens in the vocabulary.
    """

    layers: int
    width: int
    inner: int
    heads: int
    vocab: int = _VOCAB

    def sizes(self) -> tuple[int, ...]:
        """Return the elements of each parameter, in the order of transformers' LlamaForCausalLM."""
        square, wide = self.width * self.width, self.width * self.inner
        layer = (square, square, square, square, wide, wide, wide, self.width, self.width)
        table = self.vocab * self.width
        return (table, *(layer * self.layers), self.width, table)

    def passes(self, *, batch: int, seq: int) -> Passes:
        """Return the bytes and operations of the passes by published formulas, in 16 bit.

        Activations are 34 bytes per token and width in each layer, as in Korthikanti et al., "Reducing Activation
        Recomputation in Large Transformer Models" (2022), without attention scores, which fused attention does not
        keep. Operations are 2 per parameter and token in forward and 4 in backward.
        """
        tokens = batch * seq
        saved = 34 * tokens * self.width * self.layers
        kept = 2 * tokens * self.width * self.layers
        logits = 10 * tokens * self.vocab  # in 16 bit, in fp32, and the fp32 gradient
        flops = 2.0 * tokens * (sum(self.sizes()) - self.vocab * self.width)
        return Passes(
            batch=batch,
            seq=seq,
            saved_bytes=saved,
            kept_bytes=kept,
            peak_bytes=saved + logits,
            logits_bytes=logits,
            forward_flops=flops,
            backward_flops=2 * flops,
            counted=False,
        )


def llama_shape(numel: int) -> LlamaShape:
    """Return a Llama-like shape with about ``numel`` parameters; its width is about 128 per layer, as in Llama 7B."""
    layers = 1
    # No model has more layers than 200: a larger one gets wider.
    while _numel(layers, _WIDTH_PER_LAYER * layers) < numel and layers < 200:
        layers += 1
    if layers > 1 and numel - _numel(layers - 1, _WIDTH_PER_LAYER * (layers - 1)) < (
        _numel(layers, _WIDTH_PER_LAYER * layers) - numel
    ):
        layers -= 1
    # The positive root of 12 * layers * width^2 + 2 * vocab * width = numel.
    embedding = 2 * _VOCAB
    width = (-embedding + (embedding**2 + 48 * layers * numel) ** 0.5) / (24 * layers)
    rounded = max(_HEAD, round(width / _HEAD) * _HEAD)
    return LlamaShape(
        layers=max(1, round((numel - embedding * rounded) / (12 * rounded**2))),
        width=rounded,
        # As in Llama: three matrices of this width have as many weights as two of four times the width.
        inner=max(_HEAD, round(rounded * 8 / 3 / _HEAD) * _HEAD),
        heads=rounded // _HEAD,
    )


def _numel(layers: int, width: int) -> int:
    return 12 * layers * width**2 + 2 * _VOCAB * width

"""Tiny models of transformers, and a LightningModule that trains them on random tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

__all__ = ["KINDS", "LitModel", "build", "logits", "tokens"]

VOCAB, LENGTH = 67, 16
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, tie_word_embeddings=False, **_SIZES)
    return transformers.LlamaForCausalLM(config)


def _gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **_NO_DROPOUT,
    )
    return transformers.GPT2LMHeadModel(config)


def _bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_SIZES
    )
    return transformers.BertForMaskedLM(config)


def _t5(transformers: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _mixtral(transformers: Any) -> Any:
    config = transformers.MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=4, **_SIZES)
    return transformers.MixtralForCausalLM(config)


def _qwen_moe(transformers: Any) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=16,
        **_SIZES,
    )
    return transformers.Qwen3MoeForCausalLM(config)


KINDS: dict[str, Callable[[Any], Any]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "mixtral": _mixtral,
    "qwen_moe": _qwen_moe,
}


def build(kind: str) -> Any:
    """Build a model with random weights, the same every time."""
    import transformers

    torch.manual_seed(0)
    return KINDS[kind](transformers)


def tokens() -> torch.Tensor:
    """Return four sequences."""
    return torch.randint(1, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    """Return what the model makes of the tokens in evaluation."""
    model.eval()
    with torch.no_grad():
        further = {"labels": tokens()} if model.config.is_encoder_decoder else {}
        result: torch.Tensor = model(input_ids=tokens(), **further).logits
    return result


class LitModel(pl.LightningModule):
    """Trains a model of transformers, beside which it has a parameter and buffers of its own."""

    def __init__(self, kind: str = "llama", lr: float = 1e-2, *, model: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters("kind", "lr")
        self.inner = torch.nn.Module()
        self.inner.model = model if model is not None else build(kind)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.inner.model(input_ids=batch, labels=batch).loss * self.scale
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.inner.model(input_ids=batch, labels=batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams["lr"])

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

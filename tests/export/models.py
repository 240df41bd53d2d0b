"""Tiny models of transformers, a LightningModule that trains them on random tokens, and what two steps leave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME
from tests.helpers.trainers import quiet_trainer

VOCAB, LENGTH = 67, 16
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_GPT2 = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": False, **_SIZES}),
    "gpt2": ("GPT2", "LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_GPT2}),
    "bert": (
        "Bert",
        "ForMaskedLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **_SIZES},
    ),
    "t5": ("T5", "ForConditionalGeneration", {"dropout_rate": 0.0, **_T5}),
    "mixtral": ("Mixtral", "ForCausalLM", {"num_key_value_heads": 1, "num_local_experts": 4, **_SIZES}),
    "qwen_moe": ("Qwen3Moe", "ForCausalLM", {"num_key_value_heads": 1, **_EXPERTS, **_SIZES}),
}
"""Models by kind: the name of the configuration, the rest of the model's, and settings."""


def build(kind: str) -> Any:
    """Build a model with random weights, the same every time."""
    import transformers

    torch.manual_seed(0)
    name, suffix, settings = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **settings)
    return getattr(transformers, f"{name}{suffix}")(config)


def tokens() -> torch.Tensor:
    """Return four sequences."""
    return torch.randint(1, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:
    """Return what the model makes of the tokens in evaluation."""
    further = {"labels": tokens()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=tokens(), **further).logits
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
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=self.hparams["lr"])

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


@dataclass(frozen=True)
class Trained:
    """A training that is over.

    Args:
        root: Its folder, with the checkpoint ``ckpt``, and what ``save_pretrained`` wrote as ``live``, in fp32 as
            ``live32``.
        module: Its module.
        weights: The parameters as they are trained, whole, under all of their names.
        masters: Their masters.
        logits: What the model makes of some tokens in evaluation.
    """

    root: Path
    module: LitModel
    weights: dict[str, torch.Tensor]
    masters: dict[str, torch.Tensor]
    logits: torch.Tensor

    @property
    def checkpoint(self) -> Path:
        """The checkpoint."""
        return self.root / "ckpt"


def train(root: Path, module: LitModel, strategy: Any = None, **settings: Any) -> Trained:
    """Train a module, and save it in every way."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    trainer = quiet_trainer(
        root, strategy, **{"precision": "bf16-mixed", "max_steps": 2, "limit_val_batches": 0, **settings}
    )
    trainer.fit(module)
    trainer.strategy.save_pretrained(root / "live")  # type: ignore[attr-defined]
    trainer.strategy.save_pretrained(root / "live32", dtype=torch.float32)  # type: ignore[attr-defined]
    trainer.save_checkpoint(root / "ckpt")
    model: Any = module.inner.model
    params = dict(model.named_parameters(remove_duplicate=False))
    masters = {name: safe_get_full_fp32_param(param) for name, param in params.items() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: param.detach().clone() for name, param in params.items()}
        result = logits(model)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return Trained(root, module, weights, masters, result)


def exported(checkpoint: Path, out: Path, *options: str) -> Path:
    """Run the command, and return what it has written."""
    assert main(["export", str(checkpoint), str(out), *options]) == 0
    return out


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def without_checksums(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of an export, except for its checksums, which transformers does not write."""
    return {name: content for name, content in files_of(folder).items() if name != CHECKSUMS_NAME}

"""Modules as users write them, for ``package.module:Class``."""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


class WithTransformer(pl.LightningModule):
    """Holds a model of transformers, and a frozen layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=width, n_layer=2, n_head=2))
        self.frozen = nn.Linear(3, 5).requires_grad_(False)


class Plain(pl.LightningModule):
    """Builds a layer in configure_model."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(1000, 1000)


class Needy(nn.Module):
    """Cannot be built without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("counts", torch.zeros(width))


class Loading(pl.LightningModule):
    """Loads a model from a folder in configure_model, as the README does."""

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained("my-model")
        self.model.gradient_checkpointing_enable()


class Exits(nn.Module):
    def __init__(self) -> None:
        sys.exit(7)


class UsesACard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).to("xpu:77")


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.zeros(1, device="meta"))


NOT_A_CLASS = 3

"""Trains small models in loops that are not Lightning's: by Fabric and by transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from lightning_smartinfinity import RandomStates, TransferConfig
from tests.fabric.worker import quiet_fabric
from tests.helpers.model_folder import llama_config
from tests.huggingface.trained import dataset, train

AtStep = Callable[[int, torch.nn.Module], object]
"""Called before each step, with the number of steps before it and the module."""


def by_fabric(root: Path, num_steps: int, resume: str | None, at_step: AtStep) -> list[list[float]]:
    """Train in a loop of Fabric's that records; return the first elements of each batch."""
    fabric = quiet_fabric(root / "storage", precision="bf16-mixed")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3))
    if resume is not None:
        fabric.strategy.resume()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "random": RandomStates()}
    if resume is not None:
        fabric.load(resume, state)
    batches = []
    while state["step"] < num_steps:
        at_step(state["step"], module)
        batch = torch.randn(4, 8)
        batches.append(batch[:, 0].tolist())
        fabric.backward(model(batch).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        fabric.strategy.record(state)
    fabric.strategy.close()
    return batches


def by_transformers(root: Path, num_steps: int, resume: str | None, at_step: AtStep) -> list[list[float]]:
    """Train by transformers' Trainer, and save a checkpoint after 3 steps; return the first tokens of each batch."""
    model, batches = root / "model", list[list[float]]()
    if not model.exists():
        config = llama_config(hidden_size=2, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(model)

    def watch(trainer: Any) -> None:
        training_step = trainer.training_step

        def noted(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
            at_step(trainer.state.global_step, trainer.model)
            batches.append(inputs["input_ids"][:, 0].tolist())
            return training_step(module, inputs, *arguments)

        trainer.training_step = noted

    train(
        model,
        root,
        before=watch,
        resume=resume,
        data=dataset(),
        strategy={"storage": str(root / "storage"), "transfer": TransferConfig(job="run")},
        train_sampling_strategy="random",
        max_steps=num_steps,
        save_strategy="steps",
        save_steps=3,
    )
    return batches


LOOPS = {"fabric": by_fabric, "transformers": by_transformers}
"""The trainings, by kind."""

"""A user's own loop with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.huggingface.trained import BATCH, dataset, load, weights_in

ACCUMULATE = 2
SAVE_AT = 2  # batches


def run(model_folder: Path, out: Path, *, resume: Path | None = None) -> Any:
    """Train over the data once, and return the losses, the norms after each backward, and the weights."""
    losses, norms = [], []
    with SmartInfinityTraining(out / "storage") as training:
        plugin = DeepSpeedPlugin(hf_ds_config=training.config, gradient_accumulation_steps=ACCUMULATE)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATE)
        model = load(model_folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=BATCH))
        if resume is not None:
            accelerator.load_state(str(resume))
        for number, batch in enumerate(loader, 1):
            if resume is not None and number <= SAVE_AT:
                continue
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norms.append([norm_of(model), float(accelerator.clip_grad_norm_(model.parameters(), 1.0))])
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if resume is None and number == SAVE_AT:
                accelerator.save_state(str(out / "state"))
        training.save_pretrained(out / "saved")
    return losses, norms, weights_in(out / "saved")


def norm_of(model: Any) -> float:
    """Return the norm of the gradients."""
    return float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))


def reference(model_folder: Path) -> tuple[list[float], list[list[float]]]:
    """Return the losses of plain torch, and the norms after each backward."""
    model = load(model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for number, batch in enumerate(DataLoader(dataset(), batch_size=BATCH), 1):
        loss = model(**batch).loss
        (loss / ACCUMULATE).backward()
        norms.append([norm_of(model)] * 2)
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # accelerate takes 1.0 for "auto"
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def test_a_loop_trains_like_torch_and_goes_on_from_its_saved_state(model_folder: Path, tmp_path: Path) -> None:
    """Losses and norms are those of plain torch, and ``save_state`` and ``load_state`` resume bit for bit.

    "auto" takes accumulation from Accelerate, and its clipping at 1.0.
    """
    losses, norms, weights = run(model_folder, tmp_path / "whole")
    expected = reference(model_folder)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected[1]), atol=1e-4, rtol=0)
    resumed, _, after = run(model_folder, tmp_path / "resumed", resume=tmp_path / "whole" / "state")
    assert resumed == losses[SAVE_AT:]
    assert all(torch.equal(after[name], weights[name]) for name in weights)

"""Models whose parameters have no dimension, as CLIP's ``logit_scale``, train and travel as in memory."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.plain import assert_alike
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit

pytestmark = RunIf(package="transformers")

SCALAR = torch.Size([])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a pretrained CLIP of one layer."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={"image_size": 8, "patch_size": 4, **sizes}, projection_dim=16
    )
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("clip")
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


class Contrast(pl.LightningModule):
    """Trains a CLIP, which configure_model loads, on pairs of random tokens and images; its scalar may be frozen."""

    def __init__(self, weights: Path, *, frozen: bool) -> None:
        super().__init__()
        self.weights, self.frozen = weights, frozen
        self.losses: list[float] = []

    def configure_model(self) -> None:
        import transformers

        if not hasattr(self, "model"):
            self.model: Any = transformers.CLIPModel.from_pretrained(self.weights).train()
            self.model.logit_scale.requires_grad_(not self.frozen)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, images = batch
        assert self.model.logit_scale.shape == SCALAR
        loss: torch.Tensor = self.model(input_ids=tokens, pixel_values=images, return_loss=True).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With a small eps Adam turns the rounding noise of a key's bias, which has no gradient, into full steps.
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2, eps=1e-2)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, 64, (12, 6), generator=generator)
        images = torch.randn(12, 3, 8, 8, generator=generator)
        return DataLoader(torch.utils.data.TensorDataset(tokens, images), batch_size=4)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pretrained_clip_trains_and_is_saved_as_in_memory(frozen: bool, weights: Path, tmp_path: Path) -> None:
    """Losses and weights are plain Lightning's, and whatever is saved has the shape that libraries load."""
    import deepspeed
    from safetensors.torch import load_file

    plain, module, again = (Contrast(weights, frozen=frozen) for _ in range(3))
    settings: dict[str, Any] = {"precision": "32-true", "use_distributed_sampler": False}
    fit(plain, tmp_path, "auto", **settings)
    zero = {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "nvme"}}
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero=zero)
    trainer = fit(module, tmp_path, strategy, **settings)
    assert_alike(module.losses, plain.losses)
    copied = copy.deepcopy(module.model).logit_scale
    with deepspeed.zero.GatheredParameters([copied], modifier_rank=0):
        assert copied.shape == SCALAR and type(copied.data) is torch.Tensor
        copied.data.add_(1)
    torch.testing.assert_close(copied.detach(), module.model.logit_scale + 1)
    trainer.save_checkpoint(tmp_path / "ckpt")
    strategy.save_pretrained(tmp_path / "pretrained")
    strategy.close()
    for options in (["exported"], ["plain.ckpt", "--to", "lightning"]):
        assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / options[0]), *options[1:]]) == 0
    for saved in (tmp_path / "pretrained", tmp_path / "exported"):
        found = load_file(saved / "model.safetensors")
        assert found["logit_scale"].shape == SCALAR
        assert_alike(found, {name: plain.model.state_dict()[name] for name in found})
    again.configure_model()
    again.load_state_dict(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])
    assert_alike(dict(again.named_parameters()), dict(plain.named_parameters()))


def test_a_clip_that_transformers_loads_trains_as_in_memory(weights: Path, tmp_path: Path) -> None:
    """Transformers partitions a model as it loads it, before an engine exists."""
    import transformers
    from safetensors.torch import load_file

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            return model(**inputs, return_loss=True).loss  # type: ignore[no-any-return]

    def losses(name: str, **settings: Any) -> list[float]:
        """Train, and save to a folder of this name."""
        arguments = transformers.TrainingArguments(
            str(tmp_path / f"{name} run"),
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=1e-2,
            adam_epsilon=1e-2,
            logging_steps=1,
            save_strategy="no",
            train_sampling_strategy="sequential",
            report_to=[],
            disable_tqdm=True,
            **settings,
        )
        batches = Contrast.train_dataloader(None).dataset  # type: ignore[arg-type]
        rows = [{"input_ids": tokens, "pixel_values": image} for tokens, image in batches]
        trainer = Trainer(transformers.CLIPModel.from_pretrained(weights), arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses("plain")
    with SmartInfinityTraining(storage=tmp_path / "storage") as training:
        assert_alike(losses("ours", deepspeed=training.config), expected)
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved["logit_scale"].shape == SCALAR
    assert_alike(saved, {name: load_file(tmp_path / "plain" / "model.safetensors")[name] for name in saved})

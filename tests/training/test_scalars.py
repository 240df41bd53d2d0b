"""Models whose parameters have no dimension, as CLIP's ``logit_scale``, train and are saved as in memory.

Those of ``Recipe(odd=True)`` go through all kinds of checkpoints in other files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.plain import assert_alike
from tests.helpers.runif import RunIf

pytestmark = RunIf(package="transformers")

SCALAR = torch.Size([])


def test_a_clip_that_transformers_loads_trains_as_in_memory(tmp_path: Path) -> None:
    """Transformers partitions a model as it loads it, before an engine exists."""
    import transformers
    from safetensors.torch import load_file

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> torch.Tensor:
            return model(**inputs, return_loss=True).loss  # type: ignore[no-any-return]

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 64, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, **sizes}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={"image_size": 8, "patch_size": 4, **sizes}, projection_dim=16
    )
    torch.manual_seed(3)
    transformers.CLIPModel(config).save_pretrained(tmp_path / "weights")
    tokens, images = torch.randint(3, 64, (12, 6)), torch.randn(12, 3, 8, 8)
    rows = [{"input_ids": tokens[index], "pixel_values": images[index]} for index in range(12)]

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
        trainer = Trainer(transformers.CLIPModel.from_pretrained(tmp_path / "weights"), arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses("plain")
    with SmartInfinityTraining(storage=tmp_path / "storage") as training:
        assert_alike(losses("ours", deepspeed=training.config), expected)
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved["logit_scale"].shape == SCALAR
    assert_alike(saved, {name: load_file(tmp_path / "plain" / "model.safetensors")[name] for name in saved})

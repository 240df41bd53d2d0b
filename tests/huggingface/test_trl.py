"""TRL's trainers: the losses of the same trainings in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.runif import RunIf
from tests.huggingface.trained import judge, load

pytestmark = RunIf(package="trl")

WORDS = ["A drive holds", "what memory cannot", "and a ring", "of buffers", "brings it back", "in time."]
ANSWERS = [(WORDS[n % 6], " " + WORDS[(n + 1) % 6], " " + WORDS[(n + 3) % 6] + " ring") for n in range(6)]
PAIRS = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in ANSWERS]
RATED = [{"prompt": prompt, "completion": good, "label": n % 2 == 0} for n, (prompt, good, _) in enumerate(ANSWERS)]
TEXTS = [{"text": prompt + good} for prompt, good, _ in ANSWERS]
SAMPLED = {"max_completion_length": 5, "num_generations": 2, "beta": 0.1}


def lora() -> dict[str, Any]:
    import peft

    return {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


# Name of the trainer and of its configuration's, rows, further settings, and further arguments by the model's folder.
Case = tuple[str, list[dict[str, Any]], dict[str, Any], Callable[[Path], dict[str, Any]]]
CASES: dict[str, Case] = {
    "SFT": ("SFT", TEXTS, {}, lambda _: {}),
    "DPO, synchronised": ("DPO", PAIRS, {"sync_ref_model": True, "ref_model_sync_steps": 1}, lambda _: {}),
    "DPO with a reference": ("DPO", PAIRS, {}, lambda folder: {"ref_model": load(folder)}),
    "DPO with adapters": ("DPO", PAIRS, {}, lambda _: lora()),
    "DPO, precomputed": ("DPO", PAIRS, {"precompute_ref_log_probs": True}, lambda _: {}),
    "KTO": ("KTO", RATED, {}, lambda _: {}),
    "ORPO": ("ORPO", PAIRS, {}, lambda _: {}),
    "GRPO": ("GRPO", PAIRS, SAMPLED, lambda folder: {"reward_funcs": judge(folder)}),
    "Reward": ("Reward", PAIRS, {}, lambda _: {}),
}


def trainer_of(case: Case, folder: Path, out: Path, rows: Any, **changes: Any) -> Any:
    """Return TRL's trainer of a case."""
    import trl
    from datasets import Dataset
    from trl.experimental import orpo

    name, data, settings, further = case
    owner: Any = orpo if name == "ORPO" else trl
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    args = getattr(owner, f"{name}Config")(
        str(out),
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
        **changes,
    )
    transformers.set_seed(0)
    return getattr(owner, f"{name}Trainer")(
        model=judge(folder) if name == "Reward" else load(folder),
        args=args,
        train_dataset=Dataset.from_list(data) if rows is None else rows,
        processing_class=tokenizer,
        **further(folder),
    )


def losses(case: Case, folder: Path, out: Path, *, ours: bool) -> list[float]:
    with SmartInfinityTraining(out / "storage") if ours else nullcontext() as training:
        changes = {"deepspeed": training.config} if training else {"use_cpu": True}
        trainer = trainer_of(case, folder, out, None, **changes)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("name", CASES)
def test_a_trainer_of_trl_trains_as_in_memory(name: str, model_folder: Path, tmp_path: Path) -> None:
    """With a reference, a reward model, adapters or none of them, the losses of three steps are those in memory."""
    expected = losses(CASES[name], model_folder, tmp_path / "memory", ours=False)
    assert len(set(expected)) > 1, "nothing was trained"
    assert losses(CASES[name], model_folder, tmp_path / "ours", ours=True) == pytest.approx(expected, abs=1e-6)


def test_log_probabilities_are_precomputed_anew_for_other_weights(model_folder: Path, tmp_path: Path) -> None:
    """TRL stores them beside the data under a hash of the reference's weights, which ZeRO-3 leaves empty."""
    from datasets import Dataset, load_from_disk

    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "data")
    other = load(model_folder)
    with torch.no_grad():
        other.lm_head.weight.mul_(3)
    other.save_pretrained(tmp_path / "other")
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "other")
    found = []
    with SmartInfinityTraining(tmp_path / "storage") as training:
        for folder in (model_folder, tmp_path / "other", model_folder):
            rows = load_from_disk(tmp_path / "data")
            case = CASES["DPO, precomputed"]
            trainer = trainer_of(case, folder, tmp_path / "out", rows, deepspeed=training.config)
            found.append(list(trainer.train_dataset["ref_chosen_logps"]))
    assert found[0] == found[2] != found[1]

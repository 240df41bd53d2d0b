"""Loops with Accelerate, models beside the one that is trained (teachers, references, prepared or not), and TRL."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader

from lightning_smartinfinity import CheckpointError, ConfigError, UnsupportedError
from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.zero3.checkpoints.formats.scrub import scrub_checkpoint
from tests.helpers.assertions import differing
from tests.helpers.damage import flip_bit
from tests.helpers.runif import RunIf
from tests.huggingface.trained import BATCH, adapters, arguments, dataset, judge, load, weights_in

Use = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
IDS = dataset()[0]["input_ids"][None]


@torch.no_grad()
def asked(second: Any, _: object, ids: torch.Tensor) -> torch.Tensor:
    return second(input_ids=ids).logits.mean()  # type: ignore[no-any-return]


@torch.no_grad()
def asked_in_parts(second: Any, _: object, ids: torch.Tensor) -> torch.Tensor:
    """Call parts of the model before the whole, and after it."""
    parts = second.get_input_embeddings()(ids).mean() + second.score(second.model(ids).last_hidden_state).mean()
    return parts + asked(second, None, ids) + second.model(ids).last_hidden_state.mean()  # type: ignore[no-any-return]


def asked_for_gradients(second: Any, logits: torch.Tensor, _: object) -> torch.Tensor:
    """Let gradients flow through the frozen model."""
    mixed = logits.softmax(-1) @ torch.ones(logits.shape[-1], 64)
    return second(inputs_embeds=mixed * 0.01).logits.mean()  # type: ignore[no-any-return]


class Distilling(transformers.Trainer):
    """Adds what a second model answers to each loss."""

    second: Any
    use: Any

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        outputs = model(**inputs)
        return outputs.loss + self.use(self.second, outputs.logits, inputs["input_ids"])


def distil(
    folder: Path, out: Path, use: Use = asked, *, early: bool = False, strategy: dict[str, Any] | None = None
) -> list[float]:
    """Return what the model answers before the training, its losses, and what the second model answers after it.

    Args:
        folder: The model's folder.
        out: ``output_dir``.
        use: Function that asks the second model.
        early: Whether the second model is loaded before the arguments are made.
        strategy: Settings of the training; None for a training in memory.
    """
    with nullcontext() if strategy is None else SmartInfinityTraining(out / "storage", **strategy) as training:
        second = judge(folder) if early else None
        changes: dict[str, Any] = {} if training else {"use_cpu": True}
        args = arguments(out, training and training.config, max_steps=3, **changes)
        trainer = Distilling(model=load(folder), args=args, train_dataset=dataset())
        trainer.second = (second or judge(folder)).eval().requires_grad_(False)
        trainer.use = use
        losses = [asked(trainer.model, None, IDS).item()]
        trainer.train()
        losses += [log["loss"] for log in trainer.state.log_history if "loss" in log]
        losses.append(asked(trainer.second, None, IDS).item())
    # Parameters on storage are removed with the context, in which the second model has answered already.
    return losses if strategy and "zero" in strategy else [*losses, asked(trainer.second, None, IDS).item()]


@pytest.mark.parametrize(
    ("use", "early", "strategy"),
    [
        (asked, False, {}),
        (asked, True, {}),
        (asked, False, {"zero": {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}}),
        (asked_in_parts, False, {"zero": {"stage3_param_persistence_threshold": 0}}),
        (asked_for_gradients, False, {}),
    ],
)
def test_a_second_model_that_nothing_prepares(
    use: Use, early: bool, strategy: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """It answers as in memory: when it is called in parts, for gradients, from storage, and after the context."""
    expected = distil(model_folder, tmp_path / "memory", use)
    ours = distil(model_folder, tmp_path / "ours", use, early=early, strategy=strategy)
    assert ours == pytest.approx(expected[: len(ours)], abs=1e-6)


def test_a_model_that_was_trained_teaches_the_next(model_folder: Path, tmp_path: Path) -> None:
    """The engine of its own training is gone by then."""

    def rounds(out: Path, config: dict[str, Any] | None, **changes: Any) -> list[float]:
        losses, teacher = [], None
        for number in range(2):
            args = arguments(out / str(number), config, max_steps=2, learning_rate=1e-2, **changes)
            trainer = Distilling(model=load(model_folder), args=args, train_dataset=dataset())
            trainer.second = teacher or trainer.model
            trainer.use = lambda second, logits, ids: (logits - second(ids).logits.detach()).square().mean()
            if teacher is None:
                trainer.use = lambda *_: 0.0
            trainer.train()
            teacher = trainer.model.eval()
            losses += [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return losses

    expected = rounds(tmp_path / "memory", None, use_cpu=True)
    with SmartInfinityTraining(tmp_path / "storage") as training:
        assert rounds(tmp_path / "ours", training.config) == pytest.approx(expected, abs=1e-5)


def test_a_reference_by_a_copy_of_the_configuration(model_folder: Path, tmp_path: Path) -> None:
    """DeepSpeed's engine of a second model answers beside a trained one, and is not what is saved.

    TRL makes its references so, before the training (see below).
    """
    expected = asked(judge(model_folder), None, IDS).item()
    with SmartInfinityTraining(tmp_path / "storage") as training:
        args = arguments(tmp_path / "out", training.config, max_steps=2)
        trainer = transformers.Trainer(model=load(model_folder), args=args, train_dataset=dataset())
        config = copy.deepcopy(trainer.accelerator.state.deepspeed_plugin.deepspeed_config)
        del config["zero_optimization"]["offload_optimizer"]
        trainer.train()
        engine, *_ = deepspeed.initialize(model=judge(model_folder).eval(), config=config)
        assert asked(engine, None, IDS).item() == pytest.approx(expected, abs=1e-6)
        training.save_pretrained(tmp_path / "saved")
        for section in ({"stage": 2}, {"stage": 3, "offload_param": {"device": "cpu"}}):
            with pytest.raises(ConfigError, match=r"zero_optimization=.*keeps stage and offload_param"):
                deepspeed.initialize(model=judge(model_folder), config={"zero_optimization": section})
    assert load(tmp_path / "saved").lm_head.weight.isfinite().all()


def to_prepare(
    training: SmartInfinityTraining, model_folder: Path, accumulate: int = 1
) -> tuple[Accelerator, Any, Any, Any]:
    """Return an Accelerator, and what it is to prepare: a model, its optimizer and a loader."""
    plugin = DeepSpeedPlugin(hf_ds_config=training.config, gradient_accumulation_steps=accumulate)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulate)
    model = load(model_folder)
    return accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(dataset(), batch_size=BATCH)


def test_accelerate_prepares_a_second_model_after_the_trained_one(model_folder: Path, tmp_path: Path) -> None:
    """Prepared or not, it answers as in memory, and the model that is trained takes the backward pass."""
    expected = asked(judge(model_folder), None, IDS).item()
    with SmartInfinityTraining(tmp_path / "storage") as training:
        accelerator, model, optimizer, loader = to_prepare(training, model_folder)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seconds = [
            judge(model_folder).eval(),
            accelerator.prepare(judge(model_folder).eval()),
            accelerator.prepare_model(judge(model_folder).eval(), evaluation_mode=True),
        ]
        for second in seconds:
            assert asked(second, None, IDS).item() == pytest.approx(expected, abs=1e-6)
        losses = []
        for batch in [*loader][:2] * 2:
            losses.append(model(**batch).loss)
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
        assert losses[2] < losses[0]


def test_accelerate_is_given_the_second_model_first(model_folder: Path, tmp_path: Path) -> None:
    """Accelerate sends every loss to the engine that it prepared first: that one says so."""
    with SmartInfinityTraining(tmp_path / "storage") as training:
        accelerator, model, optimizer, loader = to_prepare(training, model_folder)
        accelerator.prepare(judge(model_folder), loader)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with pytest.raises(UnsupportedError, match=r"LlamaForSequenceClassification.*prepare that one before others"):
            accelerator.backward(model(**next(iter(loader))).loss)


def test_a_second_model_that_is_trained_too(model_folder: Path, tmp_path: Path) -> None:
    """It is refused by name, and the first training goes on, or ends by ``free_memory``."""
    with SmartInfinityTraining(tmp_path / "storage") as training:
        accelerator, first, optimizer, loader = to_prepare(training, model_folder)
        model, optimizer, loader = accelerator.prepare(first, optimizer, loader)
        second = judge(model_folder)
        others = torch.optim.AdamW(second.parameters())
        with pytest.raises(UnsupportedError, match=r"LlamaForSequenceClassification was given an optimizer while"):
            accelerator.prepare(second, others)
        accelerator.backward(model(**next(iter(loader))).loss)
        optimizer.step()
        accelerator.free_memory()
        accelerator.prepare(second, others, loader)


ACCUMULATE = 2
SAVE_AT = 2  # batches
ACCELERATES = ["random_states_0.pkl", "custom_checkpoint_0.pkl"]
"""Files of Accelerate in the folder of a saved state."""


def train_in_a_loop(model_folder: Path, out: Path, *, resume: Path | None = None) -> Any:
    """Train over the data once, and return the losses, the norms after each backward, and the weights.

    Before a resume, flip a bit in each of Accelerate's files: a scrub and ``load_state`` name it.
    """
    losses, norms = [], []
    with SmartInfinityTraining(out / "storage") as training:
        accelerator, model, optimizer, loader = to_prepare(training, model_folder, accumulate=ACCUMULATE)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
        if resume is not None:
            for name in ACCELERATES:
                whole = (resume / name).read_bytes()
                flip_bit(resume / name, random.Random(0))
                assert any(f"{name} is damaged" in each for each in scrub_checkpoint(resume, show=hidden).damaged)
                with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
                    accelerator.load_state(str(resume))
                (resume / name).write_bytes(whole)
            assert not (found := scrub_checkpoint(resume, show=hidden)).damaged and not found.unknown
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
                for _ in range(2):  # the second save replaces the first, and its checksums
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
    losses, norms, weights = train_in_a_loop(model_folder, tmp_path / "whole")
    expected = reference(model_folder)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected[0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected[1]), atol=1e-4, rtol=0)
    resumed, _, after = train_in_a_loop(model_folder, tmp_path / "resumed", resume=tmp_path / "whole" / "state")
    assert resumed == losses[SAVE_AT:] and differing(after, weights) == []


# ---- adapters of PEFT that are merged into partitioned weights: the weights of the same calls in memory


# ZeRO-3 keeps small parameters whole once they were gathered.
PARTITIONED = {"zero": {"stage3_param_persistence_threshold": 0}}


def merged_twice(model: Any) -> Any:
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    model.merge_adapter()
    return model


def combined(model: Any) -> Any:
    model.add_weighted_adapter(["default"], [0.5], "mixture")
    model.set_adapter("mixture")
    return model


def unloaded(model: Any) -> Any:
    return model.merge_and_unload()


def outcome(
    change: Callable[[Any], Any], folder: Path, out: Path, *, ours: bool, train: bool, gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and the first query's weight after a change of a model with adapters."""
    with SmartInfinityTraining(out / "storage", **PARTITIONED) if ours else nullcontext() as training:
        changes: dict[str, Any] = {} if training else {"use_cpu": True}
        args = arguments(out, training and training.config, max_steps=2, learning_rate=1e-2, **changes)
        model = adapters(load(folder))
        if train:
            transformers.Trainer(model=model, args=args, train_dataset=dataset()).train()
        else:
            for name, param in model.named_parameters():
                with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                    param.fill_(0.05) if "lora_B" in name else None
        with deepspeed.zero.GatheredParameters(list(model.parameters())) if gathered else nullcontext():
            model = change(model.eval())
        query = next(param for name, param in model.named_parameters() if "q_proj" in name and "lora" not in name)
        with torch.no_grad():
            logits = model(input_ids=IDS).logits
        if training and change is unloaded:
            training.save_pretrained(out / "saved", model)
        with deepspeed.zero.GatheredParameters([query]):
            return logits, query.detach().clone()


@pytest.mark.parametrize(
    ("change", "train", "gathered"),
    [
        (unloaded, True, True),
        (unloaded, False, False),
        (merged_twice, True, False),
        (combined, True, False),
    ],
)
def test_a_merge_is_that_in_memory(
    change: Callable[[Any], Any], train: bool, gathered: bool, model_folder: Path, tmp_path: Path
) -> None:
    """Before and after a training, gathered by the user or not, answers and weights are those in memory.

    ``training.save_pretrained`` takes the model that ``merge_and_unload`` returns.
    """
    expected = outcome(change, model_folder, tmp_path / "memory", ours=False, train=train, gathered=False)
    found = outcome(change, model_folder, tmp_path / "ours", ours=True, train=train, gathered=gathered)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if change is unloaded:
        with torch.no_grad():
            answers = load(tmp_path / "ours" / "saved")(input_ids=IDS).logits
        torch.testing.assert_close(answers, expected[0], atol=1e-5, rtol=1e-5)


# ---- TRL's trainers: the losses of the same trainings in memory


WORDS = ["A drive holds", "what memory cannot", "and a ring", "of buffers", "brings it back", "in time."]
ANSWERS = [(WORDS[n % 6], " " + WORDS[(n + 1) % 6], " " + WORDS[(n + 3) % 6] + " ring") for n in range(6)]
PAIRS = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in ANSWERS]
RATED = [{"prompt": prompt, "completion": good, "label": n % 2 == 0} for n, (prompt, good, _) in enumerate(ANSWERS)]
TEXTS = [{"text": prompt + good} for prompt, good, _ in ANSWERS]
SAMPLED = {"max_completion_length": 5, "num_generations": 2, "beta": 0.1}


def lora() -> dict[str, Any]:
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


@RunIf(package="trl")
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_of_trl_trains_as_in_memory(name: str, model_folder: Path, tmp_path: Path) -> None:
    """With a reference, a reward model, adapters or none of them, the losses of three steps are those in memory."""
    expected = losses(CASES[name], model_folder, tmp_path / "memory", ours=False)
    assert len(set(expected)) > 1, "nothing was trained"
    assert losses(CASES[name], model_folder, tmp_path / "ours", ours=True) == pytest.approx(expected, abs=1e-6)


@RunIf(package="trl")
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
            trainer = trainer_of(CASES["DPO, precomputed"], folder, tmp_path / "out", rows, deepspeed=training.config)
            found.append(list(trainer.train_dataset["ref_chosen_logps"]))
    assert found[0] == found[2] != found[1]

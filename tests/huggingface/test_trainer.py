"""Trainings by ``transformers.Trainer``: the same results as in Lightning, checkpoints, evaluation, adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers

from lightning_smartinfinity import ConfigError, UnsupportedError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.planning import choice, needs as plan_needs
from lightning_smartinfinity.planning.needs import MemoryKind, needs
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint
from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from tests.helpers.assertions import differing
from tests.helpers.damage import flip_bit
from tests.helpers.long_cases import long_but
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.plain import assert_alike
from tests.huggingface.trained import (
    LENGTH,
    STEPS,
    Loss,
    adapters,
    arguments,
    calling,
    dataset,
    load,
    straight,
    train,
    train_in_lightning,
    weights_in,
)


def bf16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TrainingArguments believe that bf16 can be trained here: they ask for a GPU."""
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)


def test_it_trains_to_the_bits_of_the_lightning_route(model_folder: Path, tmp_path: Path) -> None:
    """In 32-true, with the same groups, clipping, batches and schedule, losses and weights are equal bit for bit."""
    ours = straight(model_folder)
    losses, weights = train_in_lightning(model_folder, tmp_path / "lightning")
    assert (
        len(losses) == STEPS
        and losses[0] != losses[-1]
        and ours.losses == losses
        and differing(ours.weights, weights) == []
    )


@pytest.mark.parametrize("precision", long_but(["bf16-mixed"], ["32-true", "bf16-mixed"]))
def test_accumulated_it_trains_like_the_lightning_route(
    precision: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two micro-batches a step, which bf16 accumulates in fp32, too, losses differ by 1e-6 at most."""
    bf16_on_a_cpu(monkeypatch)
    mixed = precision == "bf16-mixed"
    ours = train(model_folder, tmp_path / "trainer", max_grad_norm=1.0, gradient_accumulation_steps=2, bf16=mixed)
    losses, _ = train_in_lightning(model_folder, tmp_path / "lightning", precision=precision, accumulate=2)
    assert ours.trainer.state.global_step == STEPS // 2
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(losses), atol=1e-6, rtol=0)


def test_by_transformers_own_loss_with_shuffled_batches(model_folder: Path, tmp_path: Path) -> None:
    """With answers of several lengths, an incomplete window and evaluations it is as in memory, and resumes exactly."""
    rows = dataset()
    for number, row in enumerate(rows):
        row["labels"] = torch.where(torch.arange(LENGTH) < number % LENGTH, -100, row["labels"])
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "train_sampling_strategy": "random",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }

    def logged(folder: Path, config: dict[str, Any] | None, resume: Path | None = None) -> list[tuple[str, float]]:
        trainer = transformers.Trainer(
            model=load(model_folder),
            args=arguments(folder, config, **settings),
            train_dataset=rows,
            eval_dataset=rows[:3],
        )
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return [(name, log[name]) for log in trainer.state.log_history for name in ("loss", "eval_loss") if name in log]

    expected = logged(tmp_path / "memory", None)
    with SmartInfinityTraining() as training:
        whole = logged(tmp_path / "whole", training.config)
    with SmartInfinityTraining() as training:
        resumed = logged(tmp_path / "resumed", training.config, tmp_path / "whole" / "checkpoint-2")
    assert (resumed, len(whole)) == (whole, 8)
    assert [name for name, _ in whole] == [name for name, _ in expected]
    assert [value for _, value in whole] == pytest.approx([value for _, value in expected], abs=1e-5)


def test_activations_on_storage(model_folder: Path, tmp_path: Path) -> None:
    """They change no bit, with accumulation and the model's own checkpoints."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    in_memory = train(model_folder, tmp_path / "memory", **settings)
    moved: list[int] = []

    def count(trainer: Any) -> None:
        def note(*_: Any, **__: Any) -> None:
            moved.append(trainer.model_wrapped.optimizer.rank_state.activations.traffic().written_bytes)

        trainer.add_callback(calling(on_step_end=note))

    stored = train(model_folder, tmp_path / "storage", strategy={"activations": EVERYTHING}, before=count, **settings)
    assert (
        stored.losses == in_memory.losses
        and differing(stored.weights, in_memory.weights) == []
        and moved[-1] > moved[0] > 0
    )


def test_a_saved_model_is_written_by_windows_and_loads_by_transformers_alone(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``save_model`` and every checkpoint have the bits of the training's weights; nothing gathers the whole model.

    A scrub of a checkpoint reads the model in it, too.
    """

    def gathered(*_: Any, **__: Any) -> Any:
        raise AssertionError("the whole model was gathered")

    monkeypatch.setattr(SmartInfinityEngine, "_zero3_consolidated_16bit_state_dict", gathered)
    outcome = train(model_folder, tmp_path, save_strategy="steps", save_steps=STEPS)
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    assert differing(weights_in(checkpoint), outcome.weights) == [] and main(["scrub", str(checkpoint), "--quiet"]) == 0
    flip_bit(checkpoint / "model.safetensors", Random(0))
    assert main(["scrub", str(checkpoint), "--quiet"]) == 1
    assert {"config.json", "training_args.bin"} <= {path.name for path in (tmp_path / "saved").iterdir()}
    loaded = load(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in outcome.weights.items())
    assert all(value.numel() > 0 for value in outcome.weights.values())


def test_the_best_model_is_loaded_at_the_end(model_folder: Path, tmp_path: Path) -> None:
    """With a learning rate that diverges, the best checkpoint is the first, and its weights are what is saved."""
    outcome = train(
        model_folder,
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    best = Path(outcome.trainer.state.best_model_checkpoint)
    last = weights_in(tmp_path / f"checkpoint-{STEPS}")
    assert (
        best.name != f"checkpoint-{STEPS}"
        and differing(outcome.weights, weights_in(best)) == []
        and differing(outcome.weights, last) != []
    )


def test_evaluation_before_and_after_training(model_folder: Path, tmp_path: Path) -> None:
    """A Trainer that has evaluated trains all the same, evaluates what it has trained, and generates with it.

    The model is partitioned as it is loaded: no whole model is built once the arguments exist.
    """
    losses = []
    with SmartInfinityTraining() as training:
        args = arguments(tmp_path, training.config)
        model = load(model_folder)
        assert all(param.ds_status.name == "NOT_AVAILABLE" for param in model.parameters())
        trainer = transformers.Trainer(model=model, args=args, train_dataset=dataset(), eval_dataset=dataset())
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        prompt = torch.ones(1, LENGTH, dtype=torch.long)
        tokens = trainer.model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        trainer.save_model(str(tmp_path / "saved"))
    model = load(tmp_path / "saved")
    rows = torch.stack([row["input_ids"] for row in dataset()])
    with torch.no_grad():
        expected = float(model(input_ids=rows, labels=rows).loss)
    assert losses[1] == pytest.approx(expected, abs=1e-5) and losses[1] < losses[0] and tokens.shape == (1, LENGTH + 3)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_model_that_was_not_trained_is_saved_as_it_was_loaded(
    evaluated: bool, model_folder: Path, tmp_path: Path
) -> None:
    """``save_model`` needs no training, nor an evaluation; ``save_pretrained`` of the context needs one of them."""
    with SmartInfinityTraining() as training:
        args = arguments(tmp_path, training.config)
        trainer = transformers.Trainer(model=load(model_folder), args=args, eval_dataset=dataset())
        with pytest.raises(UnsupportedError, match="before a training or an evaluation"):
            training.save_pretrained(tmp_path / "kept")
        if evaluated:
            trainer.evaluate()
            training.save_pretrained(tmp_path / "kept")
        trainer.save_model(str(tmp_path / "saved"))
        assert trainer.is_deepspeed_enabled, "the Trainer was not left as it was"
    loaded = {name: value.float() for name, value in weights_in(model_folder).items()}
    for name in ("saved", *["kept"] * evaluated):
        assert differing(weights_in(tmp_path / name), loaded) == []
    assert (tmp_path / "saved" / "training_args.bin").is_file()


@pytest.mark.parametrize("given", ["passed", "assigned", "created"])
def test_the_optimizer_that_a_trainer_is_given(given: str, model_folder: Path, tmp_path: Path) -> None:
    """It trains as in memory, with its own schedule or that of the arguments; transformers would build another one."""

    def outcome(folder: Path, config: dict[str, Any] | None) -> tuple[list[float], list[float]]:
        model, loss = load(model_folder), Loss()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
        trainer = transformers.Trainer(
            model=model,
            args=arguments(folder, config),
            train_dataset=dataset(),
            optimizers=(optimizer if given == "passed" else None, None),
            compute_loss_func=loss,
        )
        if given == "assigned":
            trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler  # type: ignore[assignment]
        elif given == "created":
            trainer.create_optimizer_and_scheduler(3)
            for group in trainer.optimizer.param_groups:
                group["weight_decay"] = 0.5
        trainer.train()
        return loss.values, [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]

    expected_losses, expected_rates = outcome(tmp_path / "memory", None)
    with SmartInfinityTraining() as training:
        losses, rates = outcome(tmp_path / "storage", training.config)
    assert (
        rates == pytest.approx(expected_rates)
        and len(set(rates)) > 2
        and losses == pytest.approx(expected_losses, abs=1e-5)
    )


def test_a_trainer_trains_twice(model_folder: Path, tmp_path: Path) -> None:
    """The second training begins with the weights of the first, and its own optimizer state."""
    first: list[dict[str, torch.Tensor]] = []

    def train_once(trainer: Any) -> None:
        trainer.train()
        trainer.save_model(str(tmp_path / "first"))
        first.append(weights_in(tmp_path / "first"))

    with pytest.warns(match="optimizer's state begins anew"):
        twice = train(model_folder, tmp_path / "twice", before=train_once)
    again = train(tmp_path / "first", tmp_path / "again")
    assert (
        twice.losses == again.losses
        and differing(twice.weights, again.weights) == []
        and differing(twice.weights, first[0]) != []
    )


@pytest.mark.parametrize("resharded", long_but([True], [False, True]))
def test_adapters_train_with_an_empty_group_and_resume(
    resharded: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA leaves the group without decay empty. The checkpoint holds the adapters only; a resume is exact."""
    if resharded:
        monkeypatch.setattr(FoundCheckpoint, "is_of_as_many", False)
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "wrap": adapters}
    whole = train(model_folder, tmp_path / "whole", **settings)
    model = whole.trainer.model
    trained_names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained_names <= set(whole.trainer.get_decay_parameter_names(model)), "no group was empty"
    resumed = train(model_folder, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-4", **settings)
    assert (resumed.losses, differing(resumed.weights, whole.weights)) == (whole.losses[4:], [])
    assert len(set(whole.losses)) > 1
    assert [name for name in whole.weights if "lora_" not in name] == []
    trained = [value for name, value in whole.weights.items() if "lora_B" in name]
    assert trained and all(value.abs().sum() > 0 for value in trained)
    files = [file.stat().st_size for file in (tmp_path / "whole" / "checkpoint-4").rglob("*model_states.pt")]
    assert files and max(files) < 100_000


def test_adapters_added_to_a_model_are_gathered_without_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving a model that has taken adapters itself gathers the adapters, and the files hold them."""
    import peft

    gathered: list[set[str]] = []
    gather = SmartInfinityEngine._zero3_consolidated_16bit_state_dict

    def gathering(engine: Any, *args: Any, **kwargs: Any) -> Any:
        found = gather(engine, *args, **kwargs)
        gathered.append(set(found))
        return found

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return model

    monkeypatch.setattr(SmartInfinityEngine, "_zero3_consolidated_16bit_state_dict", gathering)
    outcome = train(model_folder, tmp_path, wrap=with_adapters, save_strategy="steps", save_steps=STEPS)
    assert gathered and [name for name in set().union(*gathered) if "lora_" not in name] == []
    assert [name for name in outcome.weights if "lora_" not in name] == []
    assert [name for name, value in outcome.weights.items() if "lora_B" in name and value.any()]


def test_the_update_begins_within_the_backward_that_a_step_follows(model_folder: Path, tmp_path: Path) -> None:
    """With overlap="backward" every step adopts the update that began in its last backward, and bits stay the same."""
    adopted: list[tuple[int, int]] = []

    def watch(trainer: Any) -> None:
        def note(*_: Any, **__: Any) -> None:
            speculation = trainer.model_wrapped.optimizer.speculation
            adopted.append((speculation.num_adopted, speculation.num_discarded))

        trainer.add_callback(calling(on_train_end=note))

    settings: dict[str, Any] = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}
    overlapped = train(model_folder, tmp_path / "overlap", before=watch, strategy={"overlap": "backward"}, **settings)
    plain = train(model_folder, tmp_path / "none", strategy={"overlap": "none"}, **settings)
    assert (
        adopted == [(STEPS // 2, 0)]
        and overlapped.losses == plain.losses
        and differing(overlapped.weights, plain.weights) == []
    )


def test_the_storage_lies_with_the_checkpoints_or_is_named_after_them(model_folder: Path, tmp_path: Path) -> None:
    """Its folder is theirs, or in a folder that trainings share it has the output folder's name; nothing stays."""
    found: list[list[str]] = []

    def look(folder: Path) -> Any:
        callback = calling(on_step_end=lambda *_, **__: found.append([path.name for path in folder.iterdir()]))
        return lambda trainer: trainer.add_callback(callback)

    train(model_folder, tmp_path / "a", before=look(tmp_path / "a" / "smart_infinity"), max_steps=1)
    assert found[0] == ["default"] and not list((tmp_path / "a" / "smart_infinity").iterdir())
    storage = tmp_path / "nvme"
    train(model_folder, tmp_path / "b", before=look(storage), strategy={"storage": storage}, max_steps=1)
    assert len(found[1]) == 1 and found[1][0].startswith("b-") and not list(storage.iterdir())


def test_a_model_that_was_loaded_before_the_arguments(model_folder: Path, tmp_path: Path) -> None:
    """It is whole at first, and trains to the same bits."""
    partitioned, whole = straight(model_folder), load(model_folder)
    assert whole.lm_head.weight.numel() > 0
    after = train(model_folder, tmp_path / "whole", wrap=lambda _: whole)
    assert after.losses == partitioned.losses and differing(after.weights, partitioned.weights) == []


def test_a_plan_is_made_before_the_model_is_loaded(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is named, since the arguments take the configuration before it exists; the bits are the same."""
    monkeypatch.setattr(choice, "BUDGETS", (160 << 10,))
    monkeypatch.setattr(plan_needs, "_TRANSFER_BYTES", 16 << 10)  # else as much as all parameters of a tiny model
    plain = straight(model_folder)
    asked = Training(
        precision="32-true",
        accumulate=2,
        seq=8,
        build="configure_model",
        save_top_k=0,
        num_buffers=2,
        tasklet_bytes=64 << 10,
    )
    figures = survey_model(find_source(str(model_folder)), batch=1, seq=8, in_16_bit=False)
    smallest = dataclasses.replace(asked, offload_param="nvme", parameter_budget=160 << 10, gradient_budget=160 << 10)
    needed = [need.total for need in needs(figures, smallest, on_gpu=False) if need.place is MemoryKind.HOST]
    plan = {"model": str(model_folder), "seq": 8, "host_memory": max(needed)}
    seen = {}

    def look(trainer: Any) -> None:
        seen.update(trainer.args.hf_deepspeed_config.config["zero_optimization"])

    settings = {"plan": plan, "transfer": {"tasklet_bytes": 64 << 10, "num_buffers": 2}}
    planned = train(model_folder, tmp_path / "planned", strategy=settings, before=look)
    assert (
        seen["offload_param"]["device"] == "nvme"
        and seen["stage3_gather_16bit_weights_on_model_save"]
        and planned.losses == plain.losses
        and differing(planned.weights, plain.weights) == []
    )
    with pytest.raises(ConfigError, match="does not know the model yet"), SmartInfinityTraining(plan="auto"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="plans for one process"), SmartInfinityTraining(plan=plan):
        pass


# ---- a model with a parameter without a dimension


def test_a_clip_that_transformers_loads_trains_as_in_memory(tmp_path: Path) -> None:
    """Transformers partitions a model as it loads it, before an engine exists."""

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

    def losses(name: str, config: dict[str, Any] | None) -> list[float]:
        """Train, and save to a folder of this name."""
        options = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "adam_epsilon": 1e-2, "weight_decay": 0.0}
        args = arguments(tmp_path / f"{name} run", config, **options)
        trainer = Trainer(transformers.CLIPModel.from_pretrained(tmp_path / "weights"), args, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses("plain", None)
    with SmartInfinityTraining(storage=tmp_path / "storage") as training:
        assert_alike(losses("ours", training.config), expected)
    saved, plain = weights_in(tmp_path / "ours"), weights_in(tmp_path / "plain")
    assert saved["logit_scale"].shape == ()
    assert_alike(saved, {name: plain[name] for name in saved})

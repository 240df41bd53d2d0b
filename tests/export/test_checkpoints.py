"""Exports of all kinds of checkpoints, to all formats, and refusals of bad input."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from lightning_smartinfinity.cli.main import main
from lightning_smartinfinity.errors import (
    CheckpointError,
    ConfigError,
    SmartInfinityError,
    StorageFullError,
    UnsupportedError,
)
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import MODEL_KEY
from tests.export.models import LitModel, Trained, build, files_of, logits, train
from tests.helpers.attacks import Attack
from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer

Train = Callable[[str], Trained]


class Plain(pl.LightningModule):
    """A module without a model of transformers, of odd sizes and with tied weights."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(width, 3), torch.nn.Linear(width, 3)
        self.second.weight = self.first.weight
        self.spare = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(0, 2))])
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.first(batch) + self.second(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 5), batch_size=2)  # type: ignore[arg-type]


def export(checkpoint: Path, out: Path, **settings: Any) -> list[str]:
    """Export by the function behind the command."""
    return export_checkpoint(checkpoint, out, ExportSettings(**settings))


def without_description(checkpoint: Path, copy: Path) -> Path:
    """Copy a checkpoint as stock DeepSpeed would have saved it, without a description of its models."""
    shutil.copytree(checkpoint, copy)
    for file in copy.rglob("*_model_states.pt"):
        states = torch.load(file, weights_only=False)
        del states[MODEL_KEY]
        torch.save(states, file)
    return copy


# ---- Lightning's format


def test_lightning_loads_a_file_of_masters(trained: Train, tmp_path: Path) -> None:
    """load_from_checkpoint builds the module from its hyperparameters, with fp32 masters and buffers."""
    training = trained("gpt2")
    assert main(["export", str(training.checkpoint), str(tmp_path / "lit.ckpt"), "--to", "lightning"]) == 0
    loaded = LitModel.load_from_checkpoint(tmp_path / "lit.ckpt")
    assert loaded.hparams == training.module.hparams
    assert int(loaded.seen) == 3
    params = dict(loaded.inner.model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(params[name], master) for name, master in training.masters.items())
    assert params["lm_head.weight"] is params["transformer.wte.weight"]
    assert torch.load(tmp_path / "lit.ckpt", weights_only=True)["global_step"] == 2


def test_a_lightning_file_in_bf16_has_the_trained_bits(trained: Train, tmp_path: Path) -> None:
    """--dtype bf16 rounds the masters once."""
    training = trained("llama")
    export(training.checkpoint, tmp_path / "lit.ckpt", to="lightning", dtype="bf16")
    saved = torch.load(tmp_path / "lit.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[f"inner.model.{name}"], value) for name, value in training.weights.items())


# ---- modules without a model of transformers, or with several


def test_a_plain_module_keeps_its_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file holds parameters once and persistent buffers by the module's names, as save_pretrained writes it."""
    module = Plain()
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "ckpt")
    trainer.strategy.save_pretrained(tmp_path / "live")  # type: ignore[attr-defined]
    assert main(["export", str(tmp_path / "ckpt"), str(tmp_path / "out")]) == 0
    assert "names of the module" in capsys.readouterr().out
    assert files_of(tmp_path / "live") == files_of(tmp_path / "out")
    for save in (
        lambda: export(tmp_path / "ckpt", tmp_path / "parts", max_shard_size="5GB"),
        lambda: trainer.strategy.save_pretrained(tmp_path / "parts", max_shard_size="5GB"),  # type: ignore[attr-defined]
    ):
        with pytest.raises(ConfigError, match="max_shard_size='5GB' does not apply"):
            save()
    assert not (tmp_path / "parts").exists()
    import deepspeed

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == {"first.weight", "first.bias", "second.bias", "spare.0", "count"}
    assert found["count"] == 7 and found["spare.0"].shape == (0, 2)
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert all(torch.equal(found[name], param) for name, param in module.named_parameters())
    trainer.strategy.close()  # type: ignore[attr-defined]


def test_one_of_several_models_is_chosen(tmp_path: Path) -> None:
    """Without a choice the error names both; with one, that model is exported."""
    module = LitModel("gpt2")
    module.inner.teacher = build("llama").requires_grad_(False)
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "ckpt")
    save: Any = trainer.strategy.save_pretrained  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'inner.model', 'inner.teacher'.*module="):
        save(tmp_path / "live")
    save(tmp_path / "live", module.inner.teacher)
    trainer.strategy.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"'inner.model', 'inner.teacher'.*--submodule"):
        export(tmp_path / "ckpt", tmp_path / "out")
    export(tmp_path / "ckpt", tmp_path / "out", submodule="inner.teacher")
    assert files_of(tmp_path / "live") == files_of(tmp_path / "out")
    # Frozen weights are cast by the training's precision as all others, and by nothing else.
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in build("llama").state_dict().items())


# ---- checkpoints of all kinds


def test_a_checkpoint_without_a_description_needs_the_folder_of_the_model(trained: Train, tmp_path: Path) -> None:
    """With --model the result is that of a checkpoint which describes its model, whose tokenizer is copied."""
    training = trained("t5")
    stock = without_description(training.checkpoint, tmp_path / "stock")
    build("t5").save_pretrained(tmp_path / "before")
    (tmp_path / "before" / "tokenizer.json").write_text("{}")
    assert "pass the folder of the model as --model" in " ".join(export(stock, tmp_path / "plain"))
    told = export(stock, tmp_path / "out", model=tmp_path / "before")
    assert "no tokenizer" not in " ".join(told)
    files = files_of(tmp_path / "out")
    assert files.pop("tokenizer.json") == b"{}"
    assert files == files_of(training.root / "live")


def test_a_universal_checkpoint_is_exported(trained: Train, tmp_path: Path) -> None:
    """It gives the files of the checkpoint that it was made of."""
    training = trained("llama")
    assert main(["universal", str(training.checkpoint), "--into", str(tmp_path / "universal"), "--quiet"]) == 0
    export(tmp_path / "universal", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(training.root / "live")


def test_weights_alone_are_exported(tmp_path: Path) -> None:
    """A checkpoint with save_weights_only=True holds all that is needed."""
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(LitModel("gpt2"))
    trainer.save_checkpoint(tmp_path / "ckpt", weights_only=True)
    trainer.strategy.save_pretrained(tmp_path / "live")  # type: ignore[attr-defined]
    trainer.strategy.close()  # type: ignore[attr-defined]
    export(tmp_path / "ckpt", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "live")


def test_frozen_weights_that_were_left_out_come_from_the_model(tmp_path: Path) -> None:
    """The folder of --model supplies them, and without it the error names the first."""
    from lightning_smartinfinity import SmartInfinityStrategy

    before = build("mixtral")
    before.save_pretrained(tmp_path / "before", max_shard_size="20KB")
    module = LitModel("mixtral", model=before)
    before.model.requires_grad_(False)
    strategy = SmartInfinityStrategy(tmp_path / "storage", exclude_frozen_parameters=True)
    training = train(tmp_path, module, strategy, precision="32-true")
    with pytest.raises(UnsupportedError, match=r"lacks 'model.embed_tokens.weight' and .* more weights"):
        export(training.checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"'inner.model.model.embed_tokens.weight' for one"):
        export(training.checkpoint, tmp_path / "out", to="lightning")
    export(training.checkpoint, tmp_path / "out", model=tmp_path / "before")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "live")
    loaded = type(before).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded), training.logits)


def small_files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of an export but those that every export has."""
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    files = files_of(folder)
    assert files.keys() >= weights
    return {name: content for name, content in files.items() if name not in weights}


def test_small_files_come_from_several_folders(tmp_path: Path) -> None:
    """Each folder supplies what earlier ones lack, except that all files of the tokenizer come from one.

    Weights and other files of a folder from which the model was loaded are not copied.
    """
    import transformers

    before, named = tmp_path / "before", tmp_path / "named"
    build("gpt2").save_pretrained(before)
    named.mkdir()
    tokenizer = {"tokenizer.json", "merges.txt", "chat_template.jinja"}
    for folder, names in {before: {*tokenizer, "README.md", "pytorch_model.bin"}, named: {"vocab.json"}}.items():
        for name in {*names, "preprocessor_config.json"}:
            (folder / name).write_text(folder.name)
    training = train(tmp_path, LitModel("gpt2", model=transformers.GPT2LMHeadModel.from_pretrained(before)))
    export(training.checkpoint, tmp_path / "plain")
    assert files_of(tmp_path / "plain") == files_of(tmp_path / "live")
    assert small_files_of(tmp_path / "plain") == dict.fromkeys({*tokenizer, "preprocessor_config.json"}, b"before")
    export(training.checkpoint, tmp_path / "out", model=named)
    expected = {"vocab.json": b"named", "preprocessor_config.json": b"named", "chat_template.jinja": b"before"}
    assert small_files_of(tmp_path / "out") == expected
    (named / "vocab.json").unlink()
    export(training.checkpoint, tmp_path / "more", model=named)
    more = small_files_of(tmp_path / "more")
    assert more["tokenizer.json"] == more["merges.txt"] == b"before"


def test_a_checkpoint_names_any_folder_of_the_users(tmp_path: Path) -> None:
    """Of a folder that only the checkpoint names, usual small files are copied: no links, no code, nothing large."""
    named, secret = tmp_path / "named", tmp_path / "secret"
    named.mkdir()
    model = build("gpt2")
    model.config.name_or_path = str(named)
    training = train(tmp_path, LitModel("gpt2", model=model))
    secret.write_text("secret")
    for name in ("tokenizer.json", "tokenizer-of-my-bank.txt", "code.py", "config.json"):
        (named / name).write_text(name)
    (named / "vocab.json").symlink_to(secret)
    os.mkfifo(named / "merges.txt")
    with (named / "special_tokens_map.json").open("wb") as file:
        file.truncate((128 << 20) + 1)
    export(training.checkpoint, tmp_path / "out")
    assert small_files_of(tmp_path / "out").keys() == {"tokenizer.json"}
    (named / "special_tokens_map.json").unlink()
    export(training.checkpoint, tmp_path / "wanted", model=named)
    wanted = {"tokenizer.json", "tokenizer-of-my-bank.txt", "vocab.json"}
    assert small_files_of(tmp_path / "wanted").keys() == wanted
    (named / "config.json").unlink()  # then it is no folder of a model
    assert "no tokenizer" in " ".join(export(training.checkpoint, tmp_path / "less"))
    assert not small_files_of(tmp_path / "less")


@pytest.mark.parametrize("cached", [True, False])
def test_a_model_of_the_hub(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is copied from the cache, which is all that is asked; without one the command says so."""
    import huggingface_hub

    hub = tmp_path / "hub"
    snapshot = hub / "models--someone--tiny" / "snapshots" / "abc"
    if cached:
        snapshot.mkdir(parents=True)
        (snapshot / "tokenizer.json").write_text("{}")
        (hub / "models--someone--tiny" / "refs").mkdir()
        (hub / "models--someone--tiny" / "refs" / "main").write_text("abc")
    download = huggingface_hub.snapshot_download

    def from_cache(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return download(name, cache_dir=hub, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", from_cache)
    model = build("gpt2")
    model.config.name_or_path = "someone/tiny"
    training = train(tmp_path, LitModel("gpt2", model=model))
    told = " ".join(export(training.checkpoint, tmp_path / "out"))
    assert ("no tokenizer" in told) == (not cached)
    assert ("tokenizer.json" in files_of(tmp_path / "out")) == cached
    assert files_of(tmp_path / "live") == files_of(tmp_path / "out")


# ---- bad input


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_a_damaged_checkpoint_leaves_nothing(to: str, trained: Train, tmp_path: Path) -> None:
    """A flipped bit in the masters raises, and neither the export nor a hidden folder is left."""
    shutil.copytree(trained("llama").checkpoint, tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").rglob("*_optim_states.pt"))
    master = trained("llama").masters["model.layers.0.mlp.up_proj.weight"].numpy().tobytes()[:64]
    content = bytearray(file.read_bytes())
    content[content.index(master) + 7] ^= 16
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        export(tmp_path / "ckpt", tmp_path / "exports" / "out", to=to)
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
@pytest.mark.parametrize(
    "content",
    [[1], {}, {"module": 3}, {"dp_world_size": 1, "module": {}}, {"dp_world_size": 1, MODEL_KEY: 5}, "entries"],
)
def test_model_states_with_another_content(content: Any, to: str, trained: Train, tmp_path: Path) -> None:
    """A whole file with other content than a checkpoint's raises a CheckpointError, whatever the content is."""
    shutil.copytree(trained("llama").checkpoint, tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").rglob("*_model_states.pt"))
    states = torch.load(file, weights_only=False)
    changed = {**states, "param_shapes": 5, "module": None} if content == "entries" else content
    torch.save(changed, file)
    with pytest.raises(CheckpointError, match="ckpt"):
        export(tmp_path / "ckpt", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_any_flipped_bit_of_model_states(trained: Train, tmp_path: Path, attack: Attack) -> None:
    """It raises a CheckpointError, unless it lies where it changes nothing."""
    attack(
        "bit flip in the states that an export reads",
        tries=20,
        outcome="CheckpointError, or nothing that is read changes",
    )
    shutil.copytree(trained("llama").checkpoint, tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").rglob("*_model_states.pt"))
    whole, seen = file.read_bytes(), 0
    for position in range(0, len(whole), max(1, len(whole) // 20)):
        content = bytearray(whole)
        content[position] ^= 1 << position % 8
        file.write_bytes(content)
        try:
            export(tmp_path / "ckpt", tmp_path / f"out-{position}")
        except CheckpointError:
            seen += 1
    assert seen > 5


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_a_full_disk_leaves_nothing(to: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may run full at any write."""
    calls = 0
    write = os.pwrite

    def full(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageFullError, match="No space left"):
        export(trained("llama").checkpoint, tmp_path / "exports" / "out", to=to)
    assert calls == 6
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_free_space_is_checked_first(to: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written if it would not fit."""
    checkpoint = trained("llama").checkpoint  # which needs space of its own
    status = os.statvfs(tmp_path)
    small = os.statvfs_result((*status[:4], 1, *status[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(StorageFullError, match="bytes, and"):
        export(checkpoint, tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
@pytest.mark.parametrize("moment", ["writing", "replacing"])
def test_a_killed_export_leaves_nothing_under_its_name(
    moment: str, to: str, trained: Train, tmp_path: Path, attack: Attack
) -> None:
    """A process that is killed while it writes, or before the last rename, leaves no OUT; the next export is whole."""
    attack("kill within an export", tries=1, outcome="nothing is left under its name")
    checkpoint, out = trained("llama").checkpoint, tmp_path / "out"
    killed = run_module("tests.export.worker", "killed", moment, checkpoint, out, to)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not out.exists()
    assert list(tmp_path.iterdir())  # it was killed in the middle
    export(checkpoint, out, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("to", "room"), [("safetensors", "pretrained"), ("lightning", "lightning_file")])
def test_progress_counts_every_byte(
    to: str, room: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar is told of as many bytes as it was promised."""
    checkpoint = trained("gpt2").checkpoint
    told: list[int] = []

    @contextmanager
    def showing(what: str, total_bytes: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
        assert what == "Exporting" and shown
        yield told.append
        assert sum(told) == total_bytes

    monkeypatch.setattr(f"lightning_smartinfinity.export.{room}.showing_progress", showing)
    export(checkpoint, tmp_path / "out", to=to)
    assert told


def test_the_extra_is_named_where_transformers_is_missing(
    trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only exports for transformers need it."""
    checkpoint = trained("llama").checkpoint
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[huggingface\]'"):
        export(checkpoint, tmp_path / "out")
    export(checkpoint, tmp_path / "out", to="lightning")


def test_an_export_replaces_nothing(trained: Train, tmp_path: Path) -> None:
    """An existing export stays; an empty folder is used."""
    checkpoint = trained("llama").checkpoint
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out")
    before = files_of(tmp_path / "out")
    with pytest.raises(CheckpointError, match="replaces nothing"):
        export(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match="replaces nothing"):
        export(checkpoint, tmp_path / "out" / "config.json", to="lightning")
    assert files_of(tmp_path / "out") == before


def test_an_export_stays_out_of_the_checkpoint(trained: Train, tmp_path: Path) -> None:
    """A link does not hide that it would lie inside."""
    (tmp_path / "link").symlink_to(trained("llama").checkpoint)
    with pytest.raises(CheckpointError, match="would be inside the checkpoint"):
        export(trained("llama").checkpoint, tmp_path / "link" / "out")


REFUSED: dict[str, tuple[list[str], str]] = {
    "missing": (["{root}/missing"], "checkpoint"),
    "a file": (["{root}/file"], "checkpoint"),
    "a folder": (["{root}/folder"], "checkpoint"),
    "a NUL byte": (["{root}/nul\0byte"], "checkpoint"),
    "checkpoints in it": (
        ["{root}/logs"],
        "Pass a checkpoint in it: {root}/logs/version_0/step=1.ckpt, {root}/logs/version_0/step=2.ckpt, "
        "{root}/logs/version_0/step=3.ckpt and 1 more.",
    ),
    "a model that is no folder": (
        ["{checkpoint}", "--model", "{root}/missing"],
        "'{root}/missing') of an export is no folder",
    ),
    **{
        option: (["{checkpoint}", "--to", "lightning", option, value], f"{option} does not apply to --to lightning")
        for option, value in {"--model": "{root}", "--submodule": "inner.model", "--max-shard-size": "5GB"}.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_command_refuses(name: str, trained: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints our error, exits with 1, and writes nothing."""
    (tmp_path / "file").write_text("text")
    for folder in ("folder", *(f"logs/version_0/step={step}.ckpt" for step in range(1, 5))):
        (tmp_path / folder).mkdir(parents=True)
    arguments, told = REFUSED[name]
    where = {"root": tmp_path, "checkpoint": trained("llama").checkpoint}
    checkpoint, *options = (word.format(**where) for word in arguments)
    assert main(["export", checkpoint, str(tmp_path / "out"), *options]) == 1
    assert told.format(**where).lower() in capsys.readouterr().err.lower()
    assert not (tmp_path / "out").exists()


def test_unknown_words_are_refused() -> None:
    """The error names the word and those that exist."""
    with pytest.raises(ConfigError, match=r"'fp64'.*'bf16'"):
        ExportSettings(dtype="fp64")
    with pytest.raises(ConfigError, match=r"'gguf'.*'safetensors'"):
        ExportSettings(to="gguf")


@RunIf(package="peft")
def test_adapters_of_peft_are_refused(tmp_path: Path) -> None:
    """The error names a weight of an adapter, since from_pretrained would ignore it without a word."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["up_proj"]))
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(LitModel("llama", model=model))
    trainer.save_checkpoint(tmp_path / "ckpt")
    with pytest.raises(UnsupportedError, match=r"adapters of PEFT.*lora_A"):
        trainer.strategy.save_pretrained(tmp_path / "live")  # type: ignore[attr-defined]
    trainer.strategy.close()  # type: ignore[attr-defined]
    with pytest.raises(SmartInfinityError, match=r"adapters of PEFT.*lora_A"):
        export(tmp_path / "ckpt", tmp_path / "out")

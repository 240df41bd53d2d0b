"""Exports of all kinds of checkpoints, to all formats, and refusals of bad input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file

from lightning_smartinfinity.errors import (
    CheckpointError,
    ConfigError,
    SmartInfinityError,
    StorageFullError,
    UnsupportedError,
)
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import MODEL_KEY
from tests.cli.conftest import Cli
from tests.export.models import KINDS, LitModel, Trained, build, exported, files_of, logits, train, without_checksums
from tests.export.worker import after
from tests.helpers.assertions import assert_equal
from tests.helpers.attacks import Attack
from tests.helpers.damage import flip_bit_behind
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer
from tests.storage.makers import flip

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


def saved_after_a_step(module: pl.LightningModule, folder: Path) -> Any:
    """Train for a step and save a checkpoint, and return the strategy."""
    trainer = quiet_trainer(folder, max_steps=1)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "ckpt")
    return trainer.strategy


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
    """load_from_checkpoint builds the module from its hyperparameters, with fp32 masters and buffers.

    --dtype bf16 rounds the masters once.
    """
    training = trained("gpt2")
    loaded = LitModel.load_from_checkpoint(exported(training.checkpoint, tmp_path / "lit.ckpt", "--to", "lightning"))
    assert loaded.hparams == training.module.hparams and int(loaded.seen) == 3
    params = dict(loaded.inner.model.named_parameters(remove_duplicate=False))
    assert_equal(params, training.masters)
    assert params["lm_head.weight"] is params["transformer.wte.weight"]
    assert torch.load(tmp_path / "lit.ckpt", weights_only=True)["global_step"] == 2
    export(training.checkpoint, tmp_path / "bf16.ckpt", to="lightning", dtype="bf16")
    rounded = torch.load(tmp_path / "bf16.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(rounded[f"inner.model.{name}"], value) for name, value in training.weights.items())


# ---- modules without a model of transformers, or with several


def test_a_plain_module_keeps_its_names(tmp_path: Path, cli: Cli) -> None:
    """One file holds parameters once and persistent buffers by the module's names, as save_pretrained writes it.

    A checkpoint with save_weights_only=True holds all that is needed.
    """
    module = Plain()
    strategy = saved_after_a_step(module, tmp_path)
    module.trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    strategy.save_pretrained(tmp_path / "live")
    assert "names of the module" in cli("export", tmp_path / "ckpt", tmp_path / "out").out
    export(tmp_path / "weights", tmp_path / "of-weights")
    assert files_of(tmp_path / "live") == files_of(tmp_path / "out") == files_of(tmp_path / "of-weights")
    for save in (partial(export, tmp_path / "ckpt"), strategy.save_pretrained):
        with pytest.raises(ConfigError, match="max_shard_size='5GB' does not apply"):
            save(tmp_path / "parts", max_shard_size="5GB")
    assert not (tmp_path / "parts").exists()
    import deepspeed

    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == {"first.weight", "first.bias", "second.bias", "spare.0", "count"}
    assert found["count"] == 7 and found["spare.0"].shape == (0, 2)
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert all(torch.equal(found[name], param) for name, param in module.named_parameters())
    strategy.close()


def test_one_of_several_models_is_chosen(tmp_path: Path) -> None:
    """Without a choice the error names both; with one, that model is exported."""
    module = LitModel("gpt2")
    module.inner.teacher = build("llama").requires_grad_(False)
    strategy = saved_after_a_step(module, tmp_path)
    with pytest.raises(ConfigError, match=r"'inner.model', 'inner.teacher'.*module="):
        strategy.save_pretrained(tmp_path / "live")
    strategy.save_pretrained(tmp_path / "live", module.inner.teacher)
    strategy.close()
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
    assert "no tokenizer" not in " ".join(export(stock, tmp_path / "out", model=tmp_path / "before"))
    assert files_of(tmp_path / "out") == {**files_of(training.root / "live"), "tokenizer.json": b"{}"}


def test_a_universal_checkpoint_is_exported(trained: Train, tmp_path: Path, cli: Cli) -> None:
    """It gives the files of the checkpoint that it was made of."""
    training = trained("llama")
    cli("universal", training.checkpoint, "--into", tmp_path / "universal", "--quiet")
    export(tmp_path / "universal", tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(training.root / "live")


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
    with pytest.warns(UserWarning, match="before has no smart_infinity_checksums.json"):
        export(training.checkpoint, tmp_path / "out", model=tmp_path / "before")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "live")
    export(training.checkpoint, tmp_path / "again", model=tmp_path / "out")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "live")
    assert torch.equal(logits(type(before).from_pretrained(tmp_path / "out")), training.logits)
    frozen = training.weights["model.embed_tokens.weight"].numpy().tobytes()
    flip_bit_behind(frozen[:64], tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the checksum of 'model\.embed_tokens\.weight' from byte 0 on is wrong"):
        export(training.checkpoint, tmp_path / "damaged", model=tmp_path / "out")
    assert not (tmp_path / "damaged").exists()


def small_files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of an export but those that every export has."""
    weights = {"config.json", "generation_config.json", "model.safetensors"}
    files = without_checksums(folder)
    assert files.keys() >= weights
    return {name: content for name, content in files.items() if name not in weights}


def test_small_files_of_the_model(tmp_path: Path) -> None:
    """Each folder supplies what earlier ones lack, except that all files of the tokenizer come from one.

    Of a folder that only the checkpoint names, which may be any of the user's, usual small files are copied: no links,
    no code, nothing large. Of a folder that the user names, links and unusual names are, too.
    """
    before, named, secret = tmp_path / "before", tmp_path / "named", tmp_path / "secret"
    model = build("gpt2")
    model.save_pretrained(before)
    model.config.name_or_path = str(before)
    named.mkdir()
    secret.write_text("secret")
    usual = {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json"}
    for name in {*usual, "tokenizer-of-my-bank.txt", "code.py", "README.md", "pytorch_model.bin"}:
        (before / name).write_text("before")
    os.mkfifo(before / "merges.txt")
    with (before / "special_tokens_map.json").open("wb") as file:
        file.truncate((128 << 20) + 1)
    for name in ("tokenizer-of-mine.txt", "preprocessor_config.json"):
        (named / name).write_text("named")
    for folder in (before, named):
        (folder / "vocab.json").symlink_to(secret)

    training = train(tmp_path, LitModel("gpt2", model=model))
    export(training.checkpoint, tmp_path / "plain")
    assert small_files_of(tmp_path / "plain") == dict.fromkeys(usual, b"before")
    export(training.checkpoint, tmp_path / "both", model=named)
    of_user = {"tokenizer-of-mine.txt": b"named", "preprocessor_config.json": b"named", "vocab.json": b"secret"}
    assert small_files_of(tmp_path / "both") == {**of_user, "chat_template.jinja": b"before"}
    for name in ("tokenizer-of-mine.txt", "vocab.json"):
        (named / name).unlink()
    export(training.checkpoint, tmp_path / "more", model=named)
    assert small_files_of(tmp_path / "more")["tokenizer.json"] == b"before"
    (before / "config.json").unlink()  # then it is no folder of a model
    assert "no tokenizer" in " ".join(export(training.checkpoint, tmp_path / "less"))
    assert not small_files_of(tmp_path / "less")


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is copied from the cache, which is all that is asked; without one the command says so."""
    import huggingface_hub

    cached = tmp_path / "hub" / "models--someone--tiny"
    download = huggingface_hub.snapshot_download

    def from_cache(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return download(name, cache_dir=tmp_path / "hub", local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", from_cache)
    model = build("gpt2")
    model.config.name_or_path = "someone/tiny"
    training = train(tmp_path, LitModel("gpt2", model=model))
    assert "no tokenizer" in " ".join(export(training.checkpoint, tmp_path / "out"))
    assert not small_files_of(tmp_path / "out")
    for name, content in {"snapshots/abc/tokenizer.json": "{}", "refs/main": "abc"}.items():
        (cached / name).parent.mkdir(parents=True)
        (cached / name).write_text(content)
    assert "no tokenizer" not in " ".join(export(training.checkpoint, tmp_path / "more"))
    assert small_files_of(tmp_path / "more") == {"tokenizer.json": b"{}"}


# ---- bad input


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_a_damaged_checkpoint_leaves_nothing(to: str, trained: Train, tmp_path: Path) -> None:
    """A flipped bit in the masters raises, and neither the export nor a hidden folder is left."""
    shutil.copytree(trained("llama").checkpoint, tmp_path / "ckpt")
    master = trained("llama").masters["model.layers.0.mlp.up_proj.weight"].numpy().tobytes()[:64]
    flip_bit_behind(master, next((tmp_path / "ckpt").rglob("*_optim_states.pt")))
    with pytest.raises(CheckpointError, match="checksum"):
        export(tmp_path / "ckpt", tmp_path / "exports" / "out", to=to)
    assert list((tmp_path / "exports").iterdir()) == []


def test_any_flipped_bit_of_model_states(trained: Train, tmp_path: Path, attack: Attack) -> None:
    """It raises a CheckpointError, unless it lies where it changes nothing."""
    attack(
        "bit flip in the states that an export reads",
        tries=20,
        outcome="CheckpointError, or nothing that is read changes",
    )
    shutil.copytree(trained("llama").checkpoint, tmp_path / "ckpt")
    file = next((tmp_path / "ckpt").rglob("*_model_states.pt"))
    size, unseen = file.stat().st_size, 0
    positions = range(0, size, max(1, size // 20))
    for position in positions:
        whole = flip(file, position, position % 8)
        with suppress(CheckpointError):
            export(tmp_path / "ckpt", tmp_path / f"out-{position}")
            unseen += 1
        file.write_bytes(whole)
    assert unseen < len(positions) - 5


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_a_full_disk_leaves_nothing(to: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may run full at any write."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "pwrite", after(5, os.pwrite, full))
    with pytest.raises(StorageFullError, match="No space left"):
        export(trained("llama").checkpoint, tmp_path / "exports" / "out", to=to)
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
def test_free_space_is_checked_first(to: str, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written if it would not fit."""
    checkpoint = trained("llama").checkpoint  # which needs space of its own
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*status[:4], 1, *status[5:])))
    with pytest.raises(StorageFullError, match="bytes, and"):
        export(checkpoint, tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["safetensors", "lightning"])
@pytest.mark.parametrize("moment", long_but(["2", "replacing"], [*map(str, range(8)), "replacing"]))
def test_a_killed_export_leaves_nothing_under_its_name(
    moment: str, to: str, trained: Train, tmp_path: Path, attack: Attack
) -> None:
    """A process that is killed after some writes, or before the last rename, leaves no OUT; the next one is whole."""
    attack("kill within an export", tries=1, outcome="nothing is left under its name")
    checkpoint, out = trained("llama").checkpoint, tmp_path / "out"
    killed = run_module("tests.export.worker", "killed", moment, checkpoint, out, to)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not out.exists()
    assert list(tmp_path.iterdir())  # it was killed in the middle
    export(checkpoint, out, to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
    """An existing export stays; an empty folder is used. A link does not hide that it would lie in the checkpoint."""
    checkpoint = trained("llama").checkpoint
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out")
    before = files_of(tmp_path / "out")
    for path, to in (("out", "safetensors"), ("out/config.json", "lightning")):
        with pytest.raises(CheckpointError, match="replaces nothing"):
            export(checkpoint, tmp_path / path, to=to)
    assert files_of(tmp_path / "out") == before
    (tmp_path / "link").symlink_to(checkpoint)
    with pytest.raises(CheckpointError, match="would be inside the checkpoint"):
        export(checkpoint, tmp_path / "link" / "out")


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
def test_the_command_refuses(name: str, trained: Train, tmp_path: Path, cli: Cli) -> None:
    """It prints our error, exits with 1, and writes nothing."""
    (tmp_path / "file").write_text("text")
    for folder in ("folder", *(f"logs/version_0/step={step}.ckpt" for step in range(1, 5))):
        (tmp_path / folder).mkdir(parents=True)
    arguments, told = REFUSED[name]
    where = {"root": tmp_path, "checkpoint": trained("llama").checkpoint}
    checkpoint, *options = (word.format(**where) for word in arguments)
    said = cli("export", checkpoint, tmp_path / "out", *options, status=1).err.lower()
    assert told.format(**where).lower() in said and not (tmp_path / "out").exists()


def test_unknown_words_are_refused() -> None:
    """The error names the word and those that exist."""
    for settings, told in (({"dtype": "fp64"}, r"'fp64'.*'bf16'"), ({"to": "gguf"}, r"'gguf'.*'safetensors'")):
        with pytest.raises(ConfigError, match=told):
            ExportSettings(**settings)


@RunIf(package="peft")
def test_adapters_of_peft_are_refused(tmp_path: Path) -> None:
    """The error names a weight of an adapter, since from_pretrained would ignore it without a word."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["up_proj"]))
    strategy = saved_after_a_step(LitModel("llama", model=model), tmp_path)
    with pytest.raises(UnsupportedError, match=r"adapters of PEFT.*lora_A"):
        strategy.save_pretrained(tmp_path / "live")
    strategy.close()
    with pytest.raises(SmartInfinityError, match=r"adapters of PEFT.*lora_A"):
        export(tmp_path / "ckpt", tmp_path / "out")


# ---- the same weights, files and logits as transformers' own


def stock_save(kind: str, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save these weights by transformers' own save_pretrained."""
    model = build(kind).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    return folder


DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
LIVE = {"bf16": "live", "fp32": "live32"}
LIKE = [
    *((kind, "bf16") for kind in KINDS),
    *((kind, "fp32") for kind in ("llama", "t5", "mixtral")),
    ("llama", "fp16"),
]


@pytest.mark.parametrize(
    ("kind", "dtype"), long_but([case for case in LIKE if case[0] not in ("bert", "qwen_moe")], LIKE)
)
def test_an_export_has_the_files_of_transformers(kind: str, dtype: str, trained: Train, tmp_path: Path) -> None:
    """All files have the bytes that save_pretrained of transformers writes of the same weights.

    In another dtype they are those of the masters, not of the trained bf16 values, and config.json has the dtype.
    """
    training, options = trained(kind), [] if dtype == "bf16" else ["--dtype", dtype]
    weights = {name: master.to(DTYPES[dtype]) for name, master in training.masters.items()} if options else None
    expected = files_of(stock_save(kind, weights or training.weights, tmp_path / "stock"))
    assert without_checksums(exported(training.checkpoint, tmp_path / "out", *options)) == expected
    assert dtype not in LIVE or files_of(training.root / LIVE[dtype]) == files_of(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_every_weight(kind: str, trained: Train) -> None:
    """from_pretrained misses nothing, keeps the dtype, and computes the logits of the training to the bit."""
    training = trained(kind)
    model: Any = training.module.inner.model
    loaded, report = type(model).from_pretrained(training.root / "live", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), training.logits)


@pytest.mark.parametrize("size", ["20KB", "20000", " 0.02 mb "])
def test_large_weights_are_sharded(size: str, trained: Train, tmp_path: Path) -> None:
    """Files stay below the size, the index names the file of every tensor, and transformers loads them."""
    training = trained("llama")
    out = exported(training.checkpoint, tmp_path / "out", "--max-shard-size", size)
    files = set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 2 and all((out / file).stat().st_size < 22_000 for file in files)
    assert torch.equal(logits(type(training.module.inner.model).from_pretrained(out)), training.logits)

"""save_pretrained during fits, in Fabric, of parameters on storage and by two processes; the memory of exports."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.errors import CheckpointError, ConfigError, StorageFullError, UnsupportedError
from lightning_smartinfinity.export import safetensors_file
from lightning_smartinfinity.storage.folders import replacement
from lightning_smartinfinity.storage.folders.replacement import exchange
from tests.cli.conftest import Cli
from tests.export.models import LitModel, build, exported, files_of, tokens, train, without_checksums
from tests.fabric.worker import quiet_fabric
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.power_loss import content
from tests.helpers.processes import REPOSITORY, run_module
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import PROCESS_LIMIT
from tests.training.actions import does


def test_a_model_is_saved_during_a_fit(tmp_path: Path) -> None:
    """With the update beside backward it is the model of the checkpoint of that moment, and training goes on.

    Neither objects nor entries of the cache that all fake modes share stay of a further save or export.
    """
    cached: list[int] = []
    objects: list[int] = []

    def save_both(trainer: Any, module: pl.LightningModule) -> None:
        trainer.strategy.save_pretrained(tmp_path / f"live-{trainer.global_step}")
        trainer.save_checkpoint(tmp_path / f"ckpt-{trainer.global_step}")
        cached.append(len(FakeTensorMode.cache))

    strategy = SmartInfinityStrategy(tmp_path / "storage", overlap="backward")
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[does(on_train_batch_end=save_both)])
    trainer.fit(LitModel("llama"))
    strategy.close()
    saved = [files_of(tmp_path / f"live-{step}") for step in (1, 2, 3)]
    for step in (1, 2, 3):
        assert files_of(exported(tmp_path / f"ckpt-{step}", tmp_path / f"out-{step}")) == saved[step - 1]
        cached.append(len(FakeTensorMode.cache))
        gc.collect()
        objects.append(len(gc.get_objects()))
    assert saved[0] != saved[1] != saved[2] and len(set(cached[1:])) == 1 and objects[2] <= objects[1]


def test_tensors_of_many_windows_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of an odd size, smaller than most tensors, give the bytes of transformers' own file."""
    from lightning_smartinfinity.zero3.checkpoints.formats import saved_weights
    from lightning_smartinfinity.zero3.checkpoints.save import live_weights

    for module in (live_weights, saved_weights):
        monkeypatch.setattr(module, "WINDOW_NUMEL", 101)
    training = train(tmp_path, LitModel("mixtral"))
    model = build("mixtral").bfloat16()
    model.load_state_dict(training.weights)
    model.save_pretrained(tmp_path / "stock")
    assert files_of(exported(training.checkpoint, tmp_path / "out")) == files_of(tmp_path / "live")
    assert without_checksums(tmp_path / "out") == files_of(tmp_path / "stock")


def test_parameters_on_storage_are_saved(tmp_path: Path) -> None:
    """Parameters offloaded to NVMe give the files of their checkpoint, rounded and as masters."""
    offload = {
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "nvme")},
        "stage3_param_persistence_threshold": 0,
    }
    training = train(tmp_path, LitModel("gpt2"), SmartInfinityStrategy(tmp_path / "storage", zero=offload))
    for live, options in {"live": [], "live32": ["--dtype", "fp32"]}.items():
        assert files_of(exported(training.checkpoint, tmp_path / f"out-{live}", *options)) == files_of(tmp_path / live)


def test_fabric_saves_what_it_trains(tmp_path: Path, cli: Cli) -> None:
    """The default is the model that is trained; another module may be passed; a checkpoint exports to the same."""
    fabric: Any = quiet_fabric(tmp_path / "storage", precision="bf16-true")
    model = build("gpt2")
    teacher = fabric.setup_module(build("llama"))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    fabric.backward(model(input_ids=tokens(), labels=tokens()).loss, model=model)
    optimizer.step()
    for name, chosen in {"live": (), "named": (model,), "teacher": (teacher,)}.items():
        fabric.strategy.save_pretrained(tmp_path / name, *chosen)
    fabric.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    fabric.strategy.close()
    saved, named = files_of(tmp_path / "live"), files_of(tmp_path / "named")
    assert saved == files_of(exported(tmp_path / "ckpt", tmp_path / "out")) == named
    failed = cli("export", tmp_path / "ckpt", tmp_path / "lit.ckpt", "--to", "lightning", status=1)
    assert "pytorch-lightning_version" in failed.err
    build("llama").bfloat16().save_pretrained(tmp_path / "stock")
    assert without_checksums(tmp_path / "teacher") == files_of(tmp_path / "stock")


class LoadsLate(LitModel):
    """Loads its model in configure_model, where ZeRO-3 partitions it while transformers loads it."""

    def __init__(self, folder: Path) -> None:
        super().__init__("bert")
        self.folder = folder
        del self.inner.model

    def configure_model(self) -> None:
        import transformers

        if not hasattr(self.inner, "model"):
            self.inner.model = transformers.BertForMaskedLM.from_pretrained(self.folder)


def test_a_model_loaded_in_configure_model_is_saved(tmp_path: Path) -> None:
    """Legacy names that transformers considers while it loads are not in the files."""
    build("bert").save_pretrained(tmp_path / "before")
    training = train(tmp_path, LoadsLate(tmp_path / "before"))
    assert files_of(exported(training.checkpoint, tmp_path / "out")) == files_of(tmp_path / "live")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() <= training.weights.keys()


@pytest.fixture(params=["exchanged", "renamed"])
def saved_once(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pl.Trainer:
    """Train, and make a folder with old files, on a file system that exchanges folders and on one that cannot."""
    if request.param == "renamed":
        monkeypatch.setattr(replacement, "exchange", lambda first, second: False)
    trainer = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "storage"))
    trainer.fit(LitModel("gpt2"))
    trainer.strategy.save_pretrained(tmp_path / "new")  # type: ignore[attr-defined]
    (tmp_path / "out" / "runs").mkdir(parents=True)
    for name in ("tokenizer.json", "runs/log", "config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"):
        (tmp_path / "out" / name).write_text("old")
    return trainer


def test_a_folder_is_saved_to_again(saved_once: pl.Trainer, tmp_path: Path) -> None:
    """Older weights and the configuration are replaced, other files stay, and nothing lies beside the folder."""
    out, before = tmp_path / "out", {path.name for path in tmp_path.iterdir()}
    saved_once.strategy.save_pretrained(out)  # type: ignore[attr-defined]
    assert (out / "tokenizer.json").read_text() == (out / "runs" / "log").read_text() == "old"
    (out / "tokenizer.json").unlink()
    shutil.rmtree(out / "runs")
    assert files_of(out) == files_of(tmp_path / "new") and {path.name for path in tmp_path.iterdir()} == before


def test_a_folder_stays_as_it_was_if_a_save_fails(
    saved_once: pl.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether writing fails or the last step, the old files are all there."""
    save, out, rename = saved_once.strategy.save_pretrained, tmp_path / "out", os.rename  # type: ignore[attr-defined]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is no folder"):
        save(tmp_path / "file")

    fail = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def fail_to_put(old: Path, new: Path) -> None:
        if new == out and old.name == "out":
            fail()
        rename(old, new)

    before = content(out)
    exchanges = replacement.exchange is exchange
    last = (replacement, "exchange", fail) if exchanges else (replacement.os, "rename", fail_to_put)
    for owner, name, failing in ((safetensors_file.os, "pwrite", fail), last):
        with mock.patch.object(owner, name, failing), pytest.raises(StorageFullError):
            save(out)
        assert content(out) == before and not list(tmp_path.glob(".saving*"))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bool, torch.float64, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_a_dtype_that_weights_would_not_survive(dtype: torch.dtype, trained_gpt2: pl.Trainer, tmp_path: Path) -> None:
    """save_pretrained refuses it, names those that it takes, and writes nothing."""
    with pytest.raises(ConfigError, match=rf"dtype={dtype}\) .*torch.float32"):
        trained_gpt2.strategy.save_pretrained(tmp_path / "out", dtype=dtype)  # type: ignore[attr-defined]
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def trained_gpt2(tmp_path_factory: pytest.TempPathFactory) -> pl.Trainer:
    """Train a model that tests only try to save."""
    root = tmp_path_factory.mktemp("gpt2")
    trainer = quiet_trainer(root, SmartInfinityStrategy(root / "storage"))
    trainer.fit(LitModel("gpt2"))
    return trainer


@pytest.mark.parametrize("name", [".", "storage", "storage/default", "storage/default/out"])
def test_a_folder_in_which_the_training_keeps_its_state(name: str, trained_gpt2: pl.Trainer) -> None:
    """save_pretrained refuses the folder of the state, what lies in it and what holds it."""
    save: Any = trained_gpt2.strategy.save_pretrained  # type: ignore[attr-defined]
    root = Path(trained_gpt2.default_root_dir)
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigError, match="keeps its optimizer state in"):
        save(root / name)
    assert sorted(root.rglob("*")) == before
    save(root / "storage" / "other")


def test_a_model_without_values(tmp_path: Path) -> None:
    """save_pretrained names a weight that was replaced by an empty tensor or moved to meta, and writes nothing."""
    module = LitModel("gpt2")
    settings = {"stage3_param_persistence_threshold": 0}
    trainer: Any = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "storage", zero=settings))
    trainer.fit(module)
    head = module.inner.model.lm_head
    weight, head.weight = head.weight, torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UnsupportedError, match=r"' of LitModel has no values"):
        trainer.strategy.save_pretrained(tmp_path / "out")
    head.weight = weight
    module.to("meta")
    with pytest.raises(UnsupportedError, match=r"' of LitModel has no values"):
        trainer.strategy.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_arguments_of_save_pretrained_are_refused(tmp_path: Path) -> None:
    """The error names the argument; before anything ran there is nothing to save."""
    strategy = SmartInfinityStrategy(tmp_path)
    with pytest.raises(ConfigError, match=r"save_pretrained\(dtype='fp32'\) is not a dtype"):
        strategy.save_pretrained(tmp_path / "out", dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="has run nothing"):
        strategy.save_pretrained(tmp_path / "out")


# ---- two processes save what one would save, and raise together


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and save on two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = run_module("tests.export.worker", "two", folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("live", "options"), [("live", ()), ("live32", ("--dtype", "fp32"))])
def test_two_processes_save_what_is_exported_of_their_checkpoint(
    live: str, options: tuple[str, ...], out: Path, tmp_path: Path
) -> None:
    """All files have the same bytes, whether two processes write them or one reads their checkpoint."""
    assert files_of(out / live) == files_of(exported(out / "ckpt", tmp_path / "out", *options))


def test_lightning_takes_a_file_of_two_processes(out: Path, tmp_path: Path) -> None:
    """Slices of both processes are joined."""
    loaded = LitModel.load_from_checkpoint(exported(out / "ckpt", tmp_path / "lit.ckpt", "--to", "lightning"))
    params, masters = loaded.inner.model.state_dict(), load_file(out / "live32" / "model.safetensors")
    assert all(torch.equal(params[name], value) for name, value in masters.items())


def test_a_model_that_is_only_evaluated_is_saved(out: Path, tmp_path: Path) -> None:
    """On one process and on two, loaded weights give the files of the training."""
    trainer: Any = quiet_trainer(tmp_path)
    trainer.validate(LitModel("gpt2"), ckpt_path=out / "ckpt")
    trainer.strategy.save_pretrained(tmp_path / "loaded")
    assert files_of(tmp_path / "loaded") == files_of(out / "loaded") == files_of(out / "live")


def test_every_process_raises_if_one_cannot_write(out: Path) -> None:
    """Both ranks have the error of the first; what existed stays, and a failed save leaves nothing."""
    first, second = (torch.load(out / f"errors-{rank}.pt") for rank in range(2))
    assert first == second and "is no folder" in first[0] and "The third write failed" in first[1]
    assert not (out / "failed").exists() and not list(out.glob(".saving*"))


# ---- memory

DEPTH = 8  # 34 million parameters: 67 MB in bf16, 134 MB of masters
BOUND = 60_000_000


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.export.worker", "memory", tmp_path_factory.mktemp("memory"), str(DEPTH)],
        cwd=REPOSITORY,
        env=fresh_environment() | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return result


@pytest.mark.parametrize("what", ["live", "live_masters", "safetensors", "lightning"])
def test_an_export_passes_through_windows(what: str, figures: dict[str, Any]) -> None:
    """Peak memory grows by less than the weights have bytes."""
    assert 2 * figures["parameters"] > BOUND
    assert figures[what] < BOUND, figures

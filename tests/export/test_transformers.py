"""Exports that transformers loads: the same weights, files and logits as transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.cli.main import main
from tests.export.models import KINDS, Trained, build, files_of, logits
from tests.helpers.long_cases import long_but

Train = Callable[[str], Trained]


def exported(checkpoint: Path, out: Path, *options: str) -> Path:
    """Run the command."""
    assert main(["export", str(checkpoint), str(out), *options]) == 0
    return out


def stock_save(kind: str, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Save these weights by transformers' own save_pretrained."""
    model = build(kind).to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", long_but([kind for kind in KINDS if kind not in ("bert", "qwen_moe")], KINDS))
def test_an_export_has_the_files_of_transformers(kind: str, trained: Train, tmp_path: Path) -> None:
    """All files have the bytes that save_pretrained of transformers writes of the same weights."""
    training = trained(kind)
    expected = files_of(stock_save(kind, training.weights, tmp_path / "stock"))
    assert files_of(exported(training.checkpoint, tmp_path / "out")) == expected
    assert files_of(training.root / "live") == expected


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in ("llama", "t5", "mixtral")), ("llama", torch.float16)],
    ids=str,
)
def test_an_export_in_another_dtype_rounds_the_masters(
    kind: str, dtype: torch.dtype, trained: Train, tmp_path: Path
) -> None:
    """Masters are written, not the trained bf16 values, and config.json has the dtype."""
    training = trained(kind)
    masters = {name: master.to(dtype) for name, master in training.masters.items()}
    expected = files_of(stock_save(kind, masters, tmp_path / "stock"))
    option = "fp32" if dtype == torch.float32 else "fp16"
    assert files_of(exported(training.checkpoint, tmp_path / "out", "--dtype", option)) == expected
    assert option == "fp16" or files_of(training.root / "live32") == expected


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_every_weight(kind: str, trained: Train) -> None:
    """from_pretrained misses nothing, keeps the dtype, and computes the logits of the training to the bit."""
    training = trained(kind)
    model: Any = training.module.inner.model
    loaded, report = type(model).from_pretrained(training.root / "live", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), training.logits)


def test_large_weights_are_sharded(trained: Train, tmp_path: Path) -> None:
    """Files stay below the size, the index names the file of every tensor, and transformers loads them."""
    training = trained("llama")
    out = exported(training.checkpoint, tmp_path / "out", "--max-shard-size", "20KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((out / file).stat().st_size < 24_000 for file in files)
    loaded = type(training.module.inner.model).from_pretrained(out)
    assert torch.equal(logits(loaded), training.logits)

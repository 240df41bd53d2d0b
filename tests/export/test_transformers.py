"""Exports that transformers loads: the same weights, files and logits as transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.cli.main import main
from tests.export.models import KINDS, build, logits
from tests.export.trained import Trained, files_of
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.long_cases import long_but
from tests.helpers.waiting import PROCESS_LIMIT

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


@pytest.mark.parametrize("kind", ["llama", "t5", "mixtral"])
def test_an_export_in_fp32_has_the_masters(kind: str, trained: Train, tmp_path: Path) -> None:
    """Masters are written without rounding, and config.json says so."""
    training = trained(kind)
    expected = files_of(stock_save(kind, training.masters, tmp_path / "stock"))
    assert files_of(exported(training.checkpoint, tmp_path / "out", "--dtype", "fp32")) == expected
    assert files_of(training.root / "live32") == expected


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_every_weight(kind: str, trained: Train) -> None:
    """from_pretrained misses nothing, keeps the dtype, and computes the logits of the training to the bit."""
    training = trained(kind)
    model: Any = training.module.inner.model
    loaded, report = type(model).from_pretrained(training.root / "live", output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), training.logits)


def test_an_export_in_another_dtype_rounds_the_masters(trained: Train, tmp_path: Path) -> None:
    """--dtype fp16 rounds masters, not the trained bf16 values."""
    from safetensors.torch import load_file

    training = trained("llama")
    out = exported(training.checkpoint, tmp_path / "out", "--dtype", "fp16")
    expected = {name: master.half() for name, master in training.masters.items()}
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_tied_weights_are_written_once(trained: Train, tmp_path: Path) -> None:
    """The name that the model's own tie keys leave out is not in the file."""
    from safetensors import safe_open

    with safe_open(trained("t5").root / "live" / "model.safetensors", framework="pt") as file:
        assert {name for name in file.keys() if "embed" in name or "shared" in name or "lm_head" in name} == {  # noqa: SIM118
            "shared.weight"
        }


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


def test_a_process_without_this_package_loads_an_export(trained: Train, tmp_path: Path) -> None:
    """Transformers alone computes the logits of the training."""
    training = trained("llama")
    torch.save(training.logits, tmp_path / "logits.pt")
    program = (
        "import sys, torch, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(training.root / 'live')!r}).eval()\n"
        "tokens = torch.randint(1, 67, (4, 16), generator=torch.Generator().manual_seed(3))\n"
        f"assert torch.equal(model(input_ids=tokens).logits, torch.load({str(tmp_path / 'logits.pt')!r}))\n"
        "assert not any(name.startswith('lightning_smartinfinity') for name in sys.modules)\n"
    )
    environment = {**fresh_environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    assert done.returncode == 0, done.stderr

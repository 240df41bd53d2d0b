"""Sizes of models that users name, found without allocating them."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from tests.helpers.model_folder import llama_config

HERE = "tests.planning.survey.models_of_users"
CONFIG = llama_config(tie_word_embeddings=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_folder_of_a_model(folder: Path, name: str) -> None:
    """Parameters are those of the built model, in its order; tied ones count once."""
    model = survey_model(find_source(str(folder / name)), batch=2, seq=16)
    assert model.trained == tuple(param.numel() for param in LlamaForCausalLM(CONFIG).parameters())
    assert model.num_layers == 3
    assert model.passes is not None and model.assumed == ""


def test_a_module_with_a_model_of_transformers() -> None:
    """Frozen parameters and buffers count apart; the passes of the model inside are counted."""
    model = survey_model(find_source(f"{HERE}:WithTransformer", arguments={"width": 32}), batch=1, seq=16)
    inside = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    assert model.trained_numel == sum(param.numel() for param in inside.parameters())
    assert model.frozen == (15, 5)
    assert model.passes is not None


def test_a_module_of_another_kind() -> None:
    """The plan counts its parameters, also those of configure_model, and says that activations were not counted."""
    model = survey_model(find_source(f"{HERE}:Plain"), batch=1, seq=16)
    assert model.numel == 1_001_000
    assert model.passes is None and "not counted" in model.assumed


def test_buffers_count() -> None:
    """A buffer of a hundred fp32 values, in a model in fp32, takes 400 bytes."""
    source = find_source(f"{HERE}:Needy", arguments={"width": 100})
    assert survey_model(source, batch=1, seq=1, in_16_bit=False).buffer_bytes == 400


def test_a_number_becomes_a_llama() -> None:
    """The assumption is told, and of the 12 GB of a 3B model in fp32 the process does not grow by one."""
    before, dtype = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.get_default_dtype()
    model = survey_model(find_source("3B"), batch=1, seq=16)
    assert model.numel == pytest.approx(3e9, rel=0.05)
    assert "Llama" in model.assumed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB
    assert torch.get_default_dtype() == dtype


def test_without_transformers_a_number_still_has_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas take the place of counting, and the plan says so; a folder is refused with what to install."""
    _hide_transformers(monkeypatch)
    model = survey_model(find_source("7B"), batch=1, seq=512)
    assert model.passes is not None and not model.passes.counted
    assert "transformers is not installed" in model.assumed
    with pytest.raises(ConfigError, match=r"pip install '\.\[huggingface\]'"):
        find_source(str(folder))


def _hide_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    found = importlib.import_module

    def without(name: str, *args: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)


def test_passes_of_another_batch_are_counted(folder: Path) -> None:
    """The passes of one sequence equal those of a survey of one sequence, and are not a part of those of four."""
    source = find_source(str(folder))
    four, one = (survey_model(source, batch=batch, seq=16) for batch in (4, 1))
    assert four.passes_of(1) == one.passes
    assert four.passes is not None and one.passes is not None and four.passes != one.passes


def test_a_class_that_loads_a_model_is_built_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """from_pretrained builds what the folder's configuration says, here of a folder that has no weights at all."""
    monkeypatch.chdir(tmp_path)
    CONFIG.save_pretrained(tmp_path / "my-model")
    model = survey_model(find_source(f"{HERE}:Loading"), batch=2, seq=16)
    expected = survey_model(find_source(str(tmp_path / "my-model")), batch=2, seq=16)
    assert (model.trained, model.passes) == (expected.trained, expected.passes)
    assert model.checkpointing and not expected.checkpointing
    with pytest.raises(OSError, match="my-model"):
        LlamaForCausalLM.from_pretrained("my-model")  # is as it was


def test_a_model_that_fake_tensors_cannot_build_has_no_passes(tmp_path: Path) -> None:
    """The plan counts the parameters of the built model, and says that activations were not counted."""
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        architectures=["ViTForImageClassification"],
    )
    config.save_pretrained(tmp_path)
    model = survey_model(find_source(str(tmp_path)), batch=1, seq=4)
    assert model.trained == tuple(param.numel() for param in ViTForImageClassification(config).parameters())
    assert model.passes is None and "not counted" in model.assumed


def test_a_quantized_model_is_refused(folder: Path) -> None:
    """The error says that quantized weights cannot be trained, and the remedy names the model to plan for."""
    file = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    file.write_text(json.dumps(json.loads(file.read_text()) | quantized))
    with pytest.raises(UnsupportedError, match="from which it was made"):
        find_source(str(folder))


@pytest.mark.parametrize("name", ["RaisesValueError", "Exits", "UsesACard", "ReadsValues"])
def test_a_class_that_cannot_be_built_is_refused(name: str) -> None:
    """Whatever its own code raises is told by our error."""
    with pytest.raises(ConfigError, match=f"{name} cannot be built"):
        survey_model(find_source(f"{HERE}:{name}"), batch=1, seq=1)


@pytest.mark.parametrize("code", ["x = undefined", "def f(:", "import sys; sys.exit(7)"])
def test_a_module_that_cannot_be_imported_is_refused(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the module, and nothing of it decides about the exit status."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text(code)
    with pytest.raises(ConfigError, match="'broken_module' cannot be imported"):
        find_source("broken_module:Class")


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("nowhere/at/all", "such as 7B or 124M"),
        ("a" * 5000, "such as 7B or 124M"),
        ("~nobody", "such as 7B or 124M"),
        ("some-name/of-the-hub", "hf download some-name/of-the-hub config.json"),
        (__file__, "such as 7B or 124M"),
        ("3", "such as 7B"),
        ("900T", "from 1M to 1T"),
        ("no_such_package_x.y:Class", "cannot be imported"),
        (f"{HERE}:Missing", "Name a class"),
        (f"{HERE}:NOT_A_CLASS", "Name a class"),
    ],
)
def test_what_names_no_model_is_refused(spec: str, remedy: str) -> None:
    """The error names the text and a remedy."""
    with pytest.raises(ConfigError, match=remedy):
        find_source(spec)


def test_a_class_without_its_arguments_is_refused() -> None:
    """The remedy shows how to pass them."""
    with pytest.raises(ConfigError, match="--init-args"):
        survey_model(find_source(f"{HERE}:Needy"), batch=1, seq=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "wide"), ("num_attention_heads", 0), ("hidden_act", "nonsense"), ("dtype", "float99")],
)
def test_a_configuration_with_a_bad_value_is_refused(key: str, value: object, folder: Path) -> None:
    """Our error names what transformers says, whether it notices when it reads the file or when it builds the model."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=rf"{key}|{value}|by zero"):
        survey_model(find_source(str(folder)), batch=1, seq=4)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A folder without config.json, one that names no architectures, one that is no JSON, and an unknown class."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_source(str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="names no architectures"):
        find_source(str(tmp_path))
    file.write_text(json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]}))
    with pytest.raises(UnsupportedError, match="NoSuchModel"):
        find_source(str(tmp_path))
    file.write_text(json.dumps({"model_type": "llama", "architectures": "LlamaForCausalLM"}))
    with pytest.raises(ConfigError, match="names no architectures"):
        find_source(str(tmp_path))
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_source(str(tmp_path))

"""Sizes of models that users name, found without allocating them."""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from lightning_smartinfinity.planning.survey.modules import survey_module
from tests.helpers.model_folder import llama_config

HERE = "tests.planning.survey.models_of_users"
CONFIG = llama_config(tie_word_embeddings=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_folder_of_a_model(folder: Path, name: str) -> None:
    """Parameters are those of the built model, in its order; tied ones count once, and passes for the batch."""
    source = find_source(str(folder / name))
    model, one = (survey_model(source, batch=batch, seq=16) for batch in (2, 1))
    assert model.trained == tuple(param.numel() for param in LlamaForCausalLM(CONFIG).parameters())
    assert (model.num_layers, model.assumed) == (3, "")
    assert model.passes is not None and model.passes_of(1) == one.passes != model.passes


def test_modules_of_users() -> None:
    """Frozen parameters and buffers count apart, those of configure_model, too; unknown passes are not counted."""
    model = survey_model(find_source(f"{HERE}:WithTransformer", arguments={"width": 32}), batch=1, seq=16)
    inside = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    assert (model.trained_numel, model.frozen) == (sum(param.numel() for param in inside.parameters()), (15, 5))
    assert model.passes is not None
    plain = survey_model(find_source(f"{HERE}:Plain"), batch=1, seq=16)
    assert plain.numel == 1_001_000
    assert plain.passes is None and "not counted" in plain.assumed
    needy = survey_model(find_source(f"{HERE}:Needy", arguments={"width": 100}), batch=1, seq=1, in_16_bit=False)
    assert needy.buffer_bytes == 400


def test_a_number_becomes_a_llama() -> None:
    """The assumption is told, and of the 4 GB of a 1B model in fp32 the process does not grow by one."""
    before, dtype = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.get_default_dtype()
    model = survey_model(find_source("1B"), batch=1, seq=16)
    assert model.numel == pytest.approx(1e9, rel=0.05)
    assert "Llama" in model.assumed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB
    assert torch.get_default_dtype() == dtype


def test_without_transformers_a_number_still_has_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas take the place of counting, and the plan says so; a folder is refused with what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = survey_model(find_source("7B"), batch=1, seq=512)
    assert model.passes is not None and not model.passes.counted
    assert "transformers is not installed" in model.assumed
    with pytest.raises(ConfigError, match=r"pip install '\.\[huggingface\]'"):
        find_source(str(folder))


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


def test_a_model_that_fake_tensors_cannot_build_has_no_passes(tmp_path: Path) -> None:
    """The plan counts the parameters of the built model, and says that activations were not counted."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ViTConfig(**sizes, architectures=["ViTForImageClassification"])
    config.save_pretrained(tmp_path)
    model = survey_model(find_source(str(tmp_path)), batch=1, seq=4)
    assert model.trained == tuple(param.numel() for param in ViTForImageClassification(config).parameters())
    assert model.passes is None and "not counted" in model.assumed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"{name} cannot be built") for name in ("Exits", "UsesACard", "ReadsValues")),
        ("Needy", "--init-args"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused(name: str, message: str) -> None:
    """Whatever its own code raises is told by our error; for a missing argument the remedy shows how to pass it."""
    with pytest.raises(ConfigError, match=message):
        survey_model(find_source(f"{HERE}:{name}"), batch=1, seq=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # Transformers notices when it reads the file or when it builds the model.
        ({"hidden_size": "wide"}, "hidden_size|wide"),
        ({"num_attention_heads": 0}, "num_attention_heads|by zero"),
        ({"hidden_act": "nonsense"}, "nonsense"),
        ({"dtype": "float99"}, "float99"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "from which it was made"),
        ({"architectures": None}, "names no architectures"),
        ({"architectures": "LlamaForCausalLM"}, "names no architectures"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_configuration_is_refused(changed: dict[str, Any], message: str, folder: Path) -> None:
    """Our error names what transformers says, or what the file lacks."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        survey_model(find_source(str(folder)), batch=1, seq=4)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    """It has no config.json, or one that is no JSON."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_source(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_source(str(tmp_path))


transformers = pytest.importorskip("transformers")


def numel_of(module: nn.Module) -> int:
    return survey_module(module, batch=1, seq=8, in_16_bit=False).numel


class Appending(pl.LightningModule):
    """Has a parameter, and builds into a list that is there, unless that was done."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList()
        self.log_of_calls: list[str] = []

    def configure_model(self) -> None:
        self.log_of_calls.append("called")
        if len(self.layers) == 0:
            self.layers.extend(nn.Linear(8, 8) for _ in range(3))
            self.register_buffer("mask", torch.ones(4))
            self.drawn = random.random(), float(np.random.rand())


class Nesting(pl.LightningModule):
    """Has a module inside that it configures."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Appending()

    def configure_model(self) -> None:
        self.inner.configure_model()


def test_the_module_does_not_change() -> None:
    """Neither it nor a module inside has parameters, buffers or entries of lists that it had not before."""
    module = Nesting()
    inner = module.inner
    random.seed(1)
    np.random.seed(1)
    assert numel_of(module) == 217
    assert (len(inner.layers), inner.log_of_calls) == (0, [])
    assert not hasattr(inner, "mask")
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers()))
    module.configure_model()
    random.seed(1)
    np.random.seed(1)
    assert inner.drawn == (random.random(), float(np.random.rand()))
    assert sum(param.numel() for param in module.parameters()) == numel_of(module) == 217


def test_a_module_that_trains_nothing() -> None:
    """The error says so, and does not ask for a name."""
    with pytest.raises(ConfigError, match="no parameter to train"):
        numel_of(pl.LightningModule())


class Subclass(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A model with a constructor of its own."""

    def __init__(self, config: Any, extra: int) -> None:
        super().__init__(config)
        self.extra = extra


class Holding(pl.LightningModule):
    """Holds a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )


def test_a_model_of_transformers_that_exists(config: Any) -> None:
    """Its passes are counted, its activation checkpoints are seen, and its configuration stays as it is."""
    model = transformers.LlamaForCausalLM(config)
    plain = survey_module(Holding(model), batch=1, seq=8, in_16_bit=False)
    assert plain.passes is not None and not plain.checkpointing
    model.gradient_checkpointing_enable()
    assert survey_module(Holding(model), batch=1, seq=8, in_16_bit=False).checkpointing
    assert model.config.use_cache is True


def test_a_model_that_cannot_be_built_anew(config: Any) -> None:
    """A subclass with another constructor is planned by its sizes, and the figures say what was not counted."""
    model = Subclass(config, 3)
    figures = survey_module(Holding(model), batch=1, seq=8, in_16_bit=False)
    assert figures.numel == sum(param.numel() for param in model.parameters())
    assert figures.passes is None and "not counted" in figures.assumed

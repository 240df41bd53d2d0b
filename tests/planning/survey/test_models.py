"""Sizes of models that users name, found without allocating them: counted by formulas, or measured here."""

from __future__ import annotations

import json
import random
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from lightning_smartinfinity.errors import ConfigError, StorageError, UnsupportedError
from lightning_smartinfinity.planning.pace import assumed_rates, pace
from lightning_smartinfinity.planning.survey import rates
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from lightning_smartinfinity.planning.survey.modules import survey_module
from lightning_smartinfinity.planning.survey.passes import count_passes, loss_of
from lightning_smartinfinity.planning.survey.rates import measure_drive, measure_rates, require_device
from lightning_smartinfinity.planning.survey.resources import survey_resources
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.storage.jobs.jobs import Job, find_jobs
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
    model, one = (survey_model(find_source(str(folder / name)), batch=batch, seq=16) for batch in (2, 1))
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
    assert plain.numel == 1_001_000 and plain.passes is None and "not counted" in plain.assumed
    needy = survey_model(find_source(f"{HERE}:Needy", arguments={"width": 100}), batch=1, seq=1, in_16_bit=False)
    assert needy.buffer_bytes == 400


def test_a_number_becomes_a_llama() -> None:
    """The assumption is told, and of the 4 GB of a 1B model in fp32 the process does not grow by one."""
    before, dtype = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.get_default_dtype()
    model = survey_model(find_source("1B"), batch=1, seq=16)
    assert model.numel == pytest.approx(1e9, rel=0.05) and "Llama" in model.assumed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB
    assert torch.get_default_dtype() == dtype


def test_without_transformers_a_number_still_has_a_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas take the place of counting, and the plan says so; a folder is refused with what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = survey_model(find_source("7B"), batch=1, seq=512)
    assert model.passes is not None and not model.passes.counted and "transformers is not installed" in model.assumed
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


surveyed = partial(survey_module, batch=1, seq=8, in_16_bit=False)


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
    assert (surveyed(module).numel, len(inner.layers), inner.log_of_calls) == (217, 0, []) and not hasattr(
        inner, "mask"
    )
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers()))
    module.configure_model()
    random.seed(1)
    np.random.seed(1)
    assert inner.drawn == (random.random(), float(np.random.rand()))
    assert sum(param.numel() for param in module.parameters()) == surveyed(module).numel == 217


def test_a_module_that_trains_nothing() -> None:
    """The error says so, and does not ask for a name."""
    with pytest.raises(ConfigError, match="no parameter to train"):
        surveyed(pl.LightningModule())


class Subclass(LlamaForCausalLM):
    """A model with a constructor of its own."""

    def __init__(self, config: Any, extra: int) -> None:
        super().__init__(config)
        self.extra = extra


class Holding(pl.LightningModule):
    """Holds a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def test_a_model_of_transformers_that_exists() -> None:
    """Its passes are counted, its activation checkpoints are seen, and its configuration stays as it is."""
    model = LlamaForCausalLM(llama_config())
    plain = surveyed(Holding(model))
    assert plain.passes is not None and not plain.checkpointing
    model.gradient_checkpointing_enable()
    assert surveyed(Holding(model)).checkpointing
    assert model.config.use_cache is True


def test_a_model_that_cannot_be_built_anew() -> None:
    """A subclass with another constructor is planned by its sizes, and the figures say what was not counted."""
    model = Subclass(llama_config(), 3)
    figures = surveyed(Holding(model))
    assert figures.numel == sum(param.numel() for param in model.parameters())
    assert figures.passes is None and "not counted" in figures.assumed


# ---- rates that are measured on this machine, and what it has


TRAINING = Training(seq=16)


def test_measuring_leaves_only_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rates but a GPU's and a network's are measured, a plan's step is one figure, and the folder is as before."""
    config = llama_config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2, vocab_size=64
    )
    config.save_pretrained(tmp_path / "model")
    source = find_source(str(tmp_path / "model"))
    model = survey_model(source, batch=1, seq=16)
    monkeypatch.setattr(
        "lightning_smartinfinity.planning.survey.rates.measure_drive", partial(measure_drive, numel=100_000)
    )
    storage = tmp_path / "storage"
    rates = assumed_rates(on_gpu=False, cores=2)
    measured = measure_rates(source, model, TRAINING, rates, storage=storage, device="cpu")
    assert {name for name, of in vars(measured).items() if not of.measured} == {"to_gpu", "network"}
    assert min(of.low for of in vars(measured).values()) > 0 and list(storage.iterdir()) == []
    found = pace(model, TRAINING, measured, on_gpu=False)
    assert found is not None and found.step.measured and found.step.low == pytest.approx(found.step.high)
    assert config.num_hidden_layers == 5


def test_a_measurement_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed measurement leaves a job, which can be listed and removed."""
    left: list[Job] = []
    monkeypatch.setattr(rates, "_measured", lambda *_: left.extend(find_jobs(tmp_path)))
    measure_drive(tmp_path, numel=100_000)
    (job,) = left
    assert job.name.startswith("measure-") and job.in_use


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The remedy names the option, and a drive without room is no crash."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--storage"):
        measure_drive(tmp_path / "file" / "below", numel=100_000)


def test_a_gpu_that_is_not_here_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of another machine cannot be measured on this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert require_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="Leave out --measure"):
        require_device("cuda")


def test_what_this_machine_has(tmp_path: Path) -> None:
    """The disk is that of the nearest folder that exists; memory is what the kernel says is available."""
    found = survey_resources(tmp_path / "not" / "yet")
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < found.host_memory <= total and 0 < found.disk <= found.drive_bytes and found.cores >= 1
    assert found.on_gpu == (torch.cuda.device_count() > 0)


# ---- counts on fake tensors against what real tensors take


COUNTED = llama_config(num_hidden_layers=4, vocab_size=512, use_cache=False)
BATCH, SEQ = 2, 32


@pytest.fixture(scope="module")
def passes():  # type: ignore[no-untyped-def]
    with FakeTensorMode():
        found, why = count_passes(LlamaForCausalLM(COUNTED), batch=BATCH, seq=SEQ)
    assert found is not None, why
    return found


@pytest.mark.seam("counting bytes", "torch.utils._python_dispatch.TorchDispatchMode; untyped_storage lives as memory.")
def test_saved_bytes_are_what_autograd_saves(passes) -> None:  # type: ignore[no-untyped-def]
    """Autograd's own hooks on a real model see as many bytes as the count, within 5 %."""
    model = LlamaForCausalLM(COUNTED)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch=BATCH, seq=SEQ)
    assert passes.saved_bytes == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.05)


@pytest.mark.seam(
    "counting attention on a CPU",
    "Torch counts no ``aten._scaled_dot_product_flash_attention_for_cpu``, nor its "
    "``_scaled_dot_product_flash_attention_for_cpu_backward``.",
)
def test_operations_are_those_of_the_matrices(passes) -> None:  # type: ignore[no-untyped-def]
    """Forward takes two operations per weight of a matrix and token, and attention; backward takes twice as many."""
    model = LlamaForCausalLM(COUNTED)
    tokens = BATCH * SEQ
    weights = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name)
    attention = 4 * tokens * SEQ * COUNTED.hidden_size * COUNTED.num_hidden_layers
    assert passes.forward_flops == pytest.approx(2 * tokens * weights + attention, rel=0.01)
    assert passes.backward_flops == pytest.approx(2 * passes.forward_flops, rel=0.15)


def test_what_is_kept_and_at_the_peak(passes) -> None:  # type: ignore[no-untyped-def]
    """Activation checkpoints keep at least the inputs of all layers; at the peak are the logits and their gradient."""
    assert 4 * BATCH * SEQ * COUNTED.hidden_size * COUNTED.num_hidden_layers <= passes.kept_bytes < passes.saved_bytes
    one = 4 * BATCH * SEQ * COUNTED.vocab_size  # in fp32, and no more than five such tensors
    assert 2 * one <= passes.logits_bytes <= 5 * one and passes.logits_bytes < passes.peak_bytes


@pytest.mark.parametrize("text", ["no such input\nand more", ""])
def test_a_model_that_cannot_be_run_says_why(text: str) -> None:
    """The plan tells the class and the first line of what its code raises, and is made all the same."""

    class Broken(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            raise RuntimeError(text)

    with FakeTensorMode():
        found, why = count_passes(Broken(COUNTED), batch=1, seq=4)
    assert found is None and f"RuntimeError: {text}".partition("\n")[0].rstrip(": ") in why and "and more" not in why

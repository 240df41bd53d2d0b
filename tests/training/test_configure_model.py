"""Weights initialised after their module's constructor, and models of transformers, have the values of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.zero3.parameters import gather_on_use, pretrained
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.initialised import WIDTH, Initialised, Table
from tests.helpers.ranks import on_ranks
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer


class Built(pl.LightningModule):
    """A module that builds its model in configure_model.

    ``weights`` holds the values before the first step, ``losses`` one loss per step.
    """

    def __init__(self, build: Callable[[], nn.Module], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.build, self.loss = build, loss
        self.weights: dict[str, torch.Tensor] = {}
        self.first_buffers: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        # Whether ZeRO-3 had partitioned each parameter when configure_model ended.
        self.partitioned: list[bool] = []

    def configure_model(self) -> None:
        torch.manual_seed(self.global_rank)  # only the values of rank 0 count
        self.model = self.build()
        self.partitioned = [hasattr(param, "ds_id") for param in self.model.parameters()]

    def on_train_start(self) -> None:
        for name, param in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters(param):
                self.weights[name] = param.detach().clone()
        self.first_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(inputs(), batch_size=2)  # type: ignore[arg-type]


def inputs() -> torch.Tensor:
    """Return four samples."""
    return torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss for :class:`Initialised`."""
    return model(batch.to(next(model.parameters()).dtype)).float().square().mean()


def fit(module: Built, root: Path, **settings: Any) -> Built:
    """Fit for one step."""
    trainer = quiet_trainer(root, **{"precision": "32-true", "max_steps": 1, **settings})
    trainer.fit(module)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module


VOCAB, LENGTH = 64, 16


def construct(kind: str) -> nn.Module:
    """Construct a model of two small layers without dropout, which initialises its weights once all modules exist."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model: nn.Module
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **drop
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, max_position_embeddings=LENGTH, num_key_value_heads=1, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    return model


def load(folder: Path) -> nn.Module:
    """Load the model from saved weights."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)  # type: ignore[no-any-return]


class BuiltOnTokens(Built):
    """A module that trains on random tokens."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__(build, language_loss)

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(), batch_size=2)  # type: ignore[arg-type]


class Counted(BuiltOnTokens):
    """Loads a model from saved weights, and counts the bytes of tensors on the CPU meanwhile.

    ``most`` is the largest number of bytes at any time, ``kept`` the number at the end. Files that are mapped do not
    count.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(lambda: load(folder))
        self.mapped = {file.stat().st_size for file in folder.glob("*.safetensors")}
        self.most = self.kept = 0

    def configure_model(self) -> None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            super().configure_model()
        assert profiled.profiler is not None
        events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        # torch reports that it maps a file as an allocation of the file's size.
        held = list(accumulate(nbytes for nbytes in changes if abs(nbytes) not in self.mapped))
        self.most, self.kept = max(held), held[-1]


def tokens() -> torch.Tensor:
    """Return four sequences."""
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))


def language_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the model's own loss."""
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def on_each_rank(out: Path) -> dict[str, Any]:
    """Return what a rank sees of models that are constructed, and of one that is loaded from ``OUT/weights``.

    ZeRO-3 partitions parameters again as soon as others are used.
    """
    gather_on_use._GATHERED_BYTES = 0
    builds: dict[str, tuple[Built, str]] = {
        "initialised": (Built(Initialised, squares), "32-true"),
        "in bf16": (Built(Initialised, squares), "bf16-mixed"),
        "constructed": (BuiltOnTokens(lambda: construct("gpt2")), "32-true"),
        "loaded": (Counted(out / "weights"), "32-true"),
    }
    for module, precision in builds.values():
        # Otherwise ZeRO-3 keeps parameters of fewer than 100,000 elements whole once they were gathered.
        strategy = SmartInfinityStrategy(out / "storage", zero={"stage3_param_persistence_threshold": 0})
        fit(module, out, devices=2, precision=precision, strategy=strategy)
    names = ("weights", "first_buffers", "partitioned", "most", "kept")
    return {how: {name: getattr(module, name, None) for name in names} for how, (module, _) in builds.items()}


def in_torch(build: Callable[[], Any]) -> Any:
    """Return a model that plain torch builds from the seed of rank 0."""
    torch.manual_seed(0)
    return build()


def assert_same_weights(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Assert that the weights equal the model's bit for bit, after rounding to their dtype."""
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert_equal(weights, {name: value.to(weights[name].dtype) for name, value in expected.items()})


@pytest.mark.parametrize("gathered_bytes", [0, 1 << 30])
def test_every_way_to_initialise_gives_the_values_of_torch(
    gathered_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights, buffers and the first loss equal torch's, however the model initialises its weights.

    This covers in-place writes, ``.data``, views, copies, assignments, state dicts and tying. It holds whether
    parameters are partitioned again at once or stay gathered until the model is built.
    """
    monkeypatch.setattr("lightning_smartinfinity.zero3.parameters.gather_on_use._GATHERED_BYTES", gathered_bytes)
    module, expected = fit(Built(Initialised, squares), tmp_path), in_torch(Initialised)
    assert_same_weights(module.weights, expected)
    assert (
        module.losses[0] == pytest.approx(float(squares(expected, inputs()[:2]).detach()), abs=1e-6)
        and module.model.total == expected.total
        and module.model.parts["second"].weight is module.model.parts["first"].weight
    )


def reshaped() -> nn.Module:
    """Return a module that gives a child's weight another shape."""
    module = nn.Sequential(Table())
    module[0].weight.data = torch.zeros(3, WIDTH)
    return module


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """A parameter with another shape than its partitioned one raises an error that names it."""
    with refused(UnsupportedError, match=r"0\.weight"):
        fit(Built(reshaped, squares), tmp_path)


pytestmark = RunIf(package="transformers")


def saved_whole(folder: Path) -> nn.Module:
    """Save a model with changed weights, as after a training, to a folder."""
    torch.manual_seed(5)
    model: Any = construct("gpt2")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "precision"), [("gpt2", "bf16-mixed"), ("llama", "32-true")])
def test_constructed_models_are_those_of_torch(kind: str, precision: str, tmp_path: Path) -> None:
    """Weights, tied weights, buffers and the first loss equal plain torch's. Stock leaves such weights empty."""
    module = fit(BuiltOnTokens(lambda: construct(kind)), tmp_path, precision=precision)
    expected = in_torch(lambda: construct(kind))
    assert_same_weights(module.weights, expected)
    buffers = dict(expected.named_buffers())
    assert_equal({name: module.model.get_buffer(name) for name in buffers}, buffers)
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    assert module.losses[0] == pytest.approx(float(language_loss(expected, tokens()[:2])), abs=tolerance)


def resident(folder: Path) -> int:
    """Return how many bytes of the files in a folder are in memory because this process has mapped them."""
    nbytes, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):
            counts = values[-1].startswith(f"{folder}/")
        elif counts and name == "Rss:":
            nbytes += int(values[0]) * 1024
    return nbytes


def test_weights_are_never_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: list[int]) -> None:
    """Files that from_pretrained maps leave memory as they are read, and parameters go to storage one by one.

    Models that are loaded later are not partitioned.
    """
    import transformers
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    files_most, batch = 0, 1 << 20
    monkeypatch.setattr(pretrained, "_BATCH_BYTES", batch)
    original_load = nn.Module._load_from_state_dict

    def load_one(module: nn.Module, *args: Any) -> None:
        nonlocal files_most
        files_most = max(files_most, resident(tmp_path / "weights"))
        original_load(module, *args)

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", load_one)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=256, n_layer=6, n_head=2)
    whole = transformers.GPT2LMHeadModel(config)
    whole.save_pretrained(tmp_path / "weights", max_shard_size="5MB")
    files = list((tmp_path / "weights").glob("*.safetensors"))
    assert len(files) > 2
    # The largest tensor has 256 * 1024 elements, of 2 bytes on storage.
    budget = 2 * 2 * 256 * 1024
    strategy = SmartInfinityStrategy(
        tmp_path / "s", zero={"offload_param": {"device": "nvme"}}, transfer={"parameter_bytes": budget}
    )
    module = Counted(tmp_path / "weights")
    quiet_trainer(tmp_path, strategy, max_steps=1, precision="bf16-true").fit(module)
    assert_same_weights(module.weights, whole)
    assert not is_deepspeed_zero3_enabled()
    assert not any(hasattr(param, "ds_id") for param in load(tmp_path / "weights").parameters())
    assert_never_whole(module.most, [param.nbytes for param in whole.parameters()], kept=0)
    assert 0 < most[0] <= budget
    # Pages beside those that are read come with them.
    assert files_most < 4 * batch < sum(file.stat().st_size for file in files) // 4


def assert_never_whole(most: int, sizes: list[int], *, kept: int) -> None:
    """Assert that no more bytes than those of six of the largest tensors were held beside the partitions that are kept.

    One tensor is gathered and one is on its way to or from other ranks. Partitions of weights that were tied, and small
    tensors, wait for the garbage collector.
    """
    assert 0 < most - kept <= 6 * max(sizes) < sum(sizes)


def test_two_processes_take_the_values_of_the_first(tmp_path: Path) -> None:
    """Each rank draws other numbers, and both have the weights of plain torch, constructed or loaded.

    This holds for buffers, too, complex ones among them, which DeepSpeed alone leaves as each rank drew them. With
    bf16-mixed weights are drawn in fp32 and rounded when they are partitioned.
    """
    initialised = in_torch(Initialised)
    expected = {"constructed": in_torch(lambda: construct("gpt2")), "loaded": saved_whole(tmp_path / "weights")}
    for seen in on_ranks(on_each_rank, tmp_path):
        for how, model in (expected | {"initialised": initialised}).items():
            assert_same_weights(seen[how]["weights"], model)
        assert all(seen["constructed"]["partitioned"] + seen["loaded"]["partitioned"])
        torch.testing.assert_close(
            seen["initialised"]["first_buffers"], dict(initialised.named_buffers()), rtol=0, atol=0
        )
        for name, value in initialised.named_parameters():
            found = seen["in bf16"]["weights"][name]
            assert found.dtype is torch.bfloat16
            # Values computed from a partitioned weight are rounded twice.
            torch.testing.assert_close(found.float(), value.detach(), rtol=2**-7, atol=1e-6, msg=name)
        sizes, loaded = [param.nbytes for param in expected["loaded"].parameters()], seen["loaded"]
        # What Gloo's threads free is not counted as freed, so the end's bytes are more than the partitions'.
        assert sum(sizes) // 2 <= loaded["kept"]
        assert_never_whole(loaded["most"], sizes, kept=loaded["kept"])

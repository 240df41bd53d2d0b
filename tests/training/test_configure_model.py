"""Weights initialised after their module's constructor, and models of transformers, have the values of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.native import MemoryPool
from lightning_smartinfinity.zero3.parameters import param_swapper, pretrained
from tests.helpers.initialised import WIDTH, Initialised, Table
from tests.helpers.ranks import on_ranks
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer
from tests.training.configure_model_worker import (
    Built,
    BuiltOnTokens,
    Counted,
    construct,
    fit,
    inputs,
    language_loss,
    load,
    on_each_rank,
    squares,
    tokens,
)


def in_torch(build: Callable[[], Any]) -> Any:
    """Return a model that plain torch builds from the seed of rank 0."""
    torch.manual_seed(0)
    return build()


def assert_same_weights(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Assert that the weights equal the model's bit for bit, after rounding to their dtype."""
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    different = [name for name, value in weights.items() if not torch.equal(value, expected[name].to(value.dtype))]
    assert not different


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
    assert module.losses[0] == pytest.approx(float(squares(expected, inputs()[:2]).detach()), abs=1e-6)
    assert module.model.total == expected.total
    assert module.model.parts["second"].weight is module.model.parts["first"].weight


def reshaped() -> nn.Module:
    """Return a module that gives a child's weight another shape."""
    module = nn.Sequential(Table())
    module[0].weight.data = torch.zeros(3, WIDTH)
    return module


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """A parameter with another shape than its partitioned one raises an error that names it."""
    with pytest.raises(UnsupportedError, match=r"0\.weight") as caught:
        fit(Built(reshaped, squares), tmp_path)
    assert caught.value.remedy.endswith(".")


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
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.model.get_buffer(name), buffer), name
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


def test_weights_are_never_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that from_pretrained maps leave memory as they are read, and parameters go to storage one by one.

    Models that are loaded later are not partitioned.
    """
    import transformers
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    most, batch = {"files": 0, "parameters": 0}, 1 << 20
    monkeypatch.setattr(pretrained, "_BATCH_BYTES", batch)
    original_load, original_lend = nn.Module._load_from_state_dict, param_swapper.lent_tensor

    def load_one(module: nn.Module, *args: Any) -> None:
        most["files"] = max(most["files"], resident(tmp_path / "weights"))
        original_load(module, *args)

    def lend(pool: MemoryPool, nbytes: int) -> torch.Tensor:
        taken = original_lend(pool, nbytes)
        most["parameters"] = max(most["parameters"], pool.nbytes)
        return taken

    monkeypatch.setattr(nn.Module, "_load_from_state_dict", load_one)
    monkeypatch.setattr(param_swapper, "lent_tensor", lend)
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
    assert 0 < most["parameters"] <= budget
    # Pages beside those that are read come with them.
    assert most["files"] < 4 * batch < sum(file.stat().st_size for file in files) // 4
    strategy.close()


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

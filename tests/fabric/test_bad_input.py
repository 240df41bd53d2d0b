"""Bad input in a Fabric loop raises our own error with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from lightning_smartinfinity import (
    CheckpointError,
    ConfigError,
    SmartInfinityFabricStrategy,
    StorageError,
    UnsupportedError,
)
from lightning_smartinfinity.integrations.precision import SmartInfinityFabricPrecision
from tests.fabric.worker import quiet_fabric
from tests.helpers.assertions import refused


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fabric, Any, Any, Any]]:
    """Yield a Fabric, a trained model, its optimizer, and a model without one."""
    fabric = quiet_fabric(tmp_path_factory.mktemp("storage"))
    net = nn.Linear(8, 2)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()
    yield fabric, model, optimizer, fabric.setup(nn.Linear(8, 2))
    fabric.strategy.close()


def _other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


Misuse = Callable[[Fabric, Any, Any, Any], Any]
MISUSES: dict[str, tuple[Misuse, tuple[str, ...]]] = {
    "two optimizers": (
        lambda fabric, *_: fabric.setup(nn.Linear(2, 2), _other_optimizer(), _other_optimizer()),
        ("2 optimizers",),
    ),
    "a second training": (
        lambda fabric, *_: fabric.setup(nn.Linear(2, 2), _other_optimizer()),
        ("while a model is being trained", "fabric.strategy.close()"),
    ),
    "the trained module once more": (lambda fabric, model, *_: fabric.setup_module(model.module), ("Linear",)),
    "backward of a model without optimizer": (
        lambda fabric, model, optimizer, other: fabric.backward(other(torch.ones(1, 8)).sum(), model=other),
        ("without an optimizer",),
    ),
    "backward of two losses": (
        lambda fabric, model, *_: fabric.backward(model(torch.ones(1, 8))[0], model=model),
        ("(2,)",),
    ),
    "backward with create_graph": (
        lambda fabric, model, *_: fabric.backward(model(torch.ones(1, 8)).sum(), model=model, create_graph=True),
        ("create_graph",),
    ),
    "clipping by another norm": (
        lambda fabric, model, optimizer, _: fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf"),
        ("norm_type='inf'",),
    ),
    "a late parameter group": (
        lambda fabric, model, optimizer, _: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        ("add_param_group",),
    ),
    "saving into the current folder": (
        lambda fabric, model, *_: fabric.save("", {"model": model}),
        ("'' names no folder",),
    ),
    "saving to a URL": (
        lambda fabric, model, *_: fabric.save("s3://bucket/step5", {"model": model}),
        ("'s3://bucket/step5' is a URL",),
    ),
    "the optimizer's states": (lambda fabric, model, optimizer, _: len(optimizer.state), ("AdamW.state was read",)),
    "the optimizer's state dict": (lambda fabric, model, optimizer, _: optimizer.state_dict(), ("fabric.save",)),
    "loading a state dict into the optimizer": (
        lambda fabric, model, optimizer, _: optimizer.load_state_dict({}),
        ("fabric.load",),
    ),
    "saving no model": (lambda fabric, *_: fabric.save("unused", {"step": 1}), ("0 models", "'step'")),
    "saving two models": (
        lambda fabric, model, optimizer, other: fabric.save("unused", {"a": model, "b": other}),
        ("2 models",),
    ),
    "saving a model without optimizer": (
        lambda fabric, model, optimizer, other: fabric.save("unused", {"model": other}),
        ("without an optimizer",),
    ),
    "another model's optimizer": (
        lambda fabric, model, optimizer, other: fabric.load("unused", {"model": other, "optimizer": optimizer}),
        ("another one",),
    ),
    "keys of DeepSpeed's": (
        lambda fabric, model, *_: fabric.save("unused", {"model": model, "lr_scheduler": 1, "global_steps": 2}),
        ("'global_steps', 'lr_scheduler'",),
    ),
    "a filter": (
        lambda fabric, model, *_: fabric.save("unused", {"model": model}, filter={"model": lambda *_: True}),
        ("filter",),
    ),
    "plain optimizer state": (
        lambda fabric, model, optimizer, _: fabric.load_raw("state.pt", optimizer),
        ("state.pt", "AdamW"),
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused(misuse: str, trained: tuple[Fabric, Any, Any, Any]) -> None:
    """A misuse raises an error before it does anything."""
    act, named = MISUSES[misuse]
    with refused((CheckpointError, UnsupportedError), *named):
        act(*trained)
    assert not Path("unused").exists()


def test_keys_that_the_checkpoint_has_not(trained: tuple[Fabric, Any, Any, Any], tmp_path: Path) -> None:
    """A missing key raises an error. With strict=False its value stays unchanged."""
    fabric, model, optimizer, _ = trained
    fabric.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer, "step": 1})
    state = {"model": model, "optimizer": optimizer, "step": 0, "epoch": 7}
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'ckpt'} has no 'epoch'")):
        fabric.load(tmp_path / "ckpt", state)
    fabric.load(tmp_path / "ckpt", state, strict=False)
    assert (state["step"], state["epoch"]) == (1, 7)


@pytest.mark.parametrize(
    ("name", "load", "load_raw"),
    [
        ("missing", "does not exist", "does not exist"),
        ("empty", "empty", None),
        ("file", "file", "file"),
        ("n" * 300, "n" * 300, None),
        ("list.pt", "list", "no state dict"),
        ("other.pt", "other", "size mismatch"),
    ],
)
def test_paths_that_hold_nothing_to_load(
    name: str, load: str, load_raw: str | None, trained: tuple[Fabric, Any, Any, Any], tmp_path: Path
) -> None:
    """A missing path, a file, an empty folder or another model's weights raise an error that names path and fault.

    For a missing path it is a FileNotFoundError, too.
    """
    fabric, model, optimizer, _ = trained
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    torch.save([1], tmp_path / "list.pt")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "other.pt")
    kind: Any = FileNotFoundError if name == "missing" else CheckpointError
    for state in ({"model": model, "optimizer": optimizer}, {"model": model}):
        with pytest.raises(kind, match=f"{re.escape(str(tmp_path))}.*{load}") as caught:
            fabric.load(tmp_path / name, state)
        assert isinstance(caught.value, CheckpointError)
    if load_raw is not None:
        with pytest.raises(kind, match=load_raw) as caught:
            fabric.load_raw(tmp_path / name, model)
        assert isinstance(caught.value, CheckpointError)


def test_after_close(tmp_path: Path) -> None:
    """Steps and saves after close raise an error, and closing again does nothing."""
    fabric = quiet_fabric(tmp_path)
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    fabric.strategy.close()
    fabric.strategy.close()
    for act in (optimizer.step, lambda: fabric.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})):
        with pytest.raises(StorageError, match="has been closed"):
            act()


def test_precision_plugins() -> None:
    """Our plugin replaces DeepSpeed's, keeps its precision, and refuses other plugins."""
    for precision in ("bf16-true", "16-mixed"):
        fabric = Fabric(strategy=SmartInfinityFabricStrategy(), accelerator="cpu", devices=1, precision=precision)
        assert (
            type(fabric.strategy.precision) is SmartInfinityFabricPrecision
            and fabric.strategy.precision.precision == precision
        )
    with pytest.raises(UnsupportedError, match="MixedPrecision"):
        Fabric(strategy=SmartInfinityFabricStrategy(), accelerator="cpu", plugins=[MixedPrecision("bf16-mixed", "cpu")])
    with pytest.raises(ConfigError, match="64-true"):
        SmartInfinityFabricPrecision("64-true")  # type: ignore[arg-type]

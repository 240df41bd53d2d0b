"""Partitioned parameters are read, copied and written as in memory, in fp32; sharing their memory is refused."""

from __future__ import annotations

import copy
import errno
import gc
import io
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import lightning.pytorch as pl
import numpy as np
import pytest
import safetensors.torch
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig, UnsupportedError
from tests.fabric.worker import quiet_fabric
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.everyday_code import DECAY, HIDDEN, WIDTH, WRITES, Touched, master, stepped

REMEDY = r"save_pretrained\(folder\), a method of the strategy.*smart-infinity export"
# Nothing stays gathered, as in a model of real size.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LitTiny:
    """Train a small model of which no parameter stays whole."""
    root = tmp_path_factory.mktemp("trained")
    module = LitTiny(Recipe())
    fit(module, root, SmartInfinityStrategy(root / "storage", zero=NOTHING_PERSISTS))
    return module


def weight_of(module: LitTiny) -> nn.Parameter:
    return module.model.head.weight


REFUSED: dict[str, Callable[[LitTiny], object]] = {
    "torch.save(state_dict)": lambda module: torch.save(module.state_dict(), io.BytesIO()),
    "torch.save(parameters)": lambda module: torch.save(list(module.parameters()), io.BytesIO()),
    "torch.save(parameter.data)": lambda module: torch.save(weight_of(module).data, io.BytesIO()),
    "pickle.dumps(parameter)": lambda module: pickle.dumps(weight_of(module)),
    "pickle.dumps(state_dict)": lambda module: pickle.dumps(module.state_dict()),
    "pickle.dumps(module)": lambda module: pickle.dumps(module.model.head),
    "torch.save(module)": lambda module: torch.save(module.model.head, io.BytesIO()),
    "a process that is spawned": lambda module: ForkingPickler.dumps(weight_of(module)),
    "state_dict(keep_vars=True)": lambda module: torch.save(module.state_dict(keep_vars=True), io.BytesIO()),
    "safetensors": lambda module: safetensors.torch.save(module.state_dict()),
    "np.from_dlpack": lambda module: np.from_dlpack(module.state_dict()["model.head.weight"]),
    "np.from_dlpack of a parameter": lambda module: np.from_dlpack(weight_of(module)),
    "data_ptr": lambda module: weight_of(module).data_ptr(),
    "share_memory_": lambda module: weight_of(module).share_memory_(),
}
"""What would need memory of the parameter's own."""


@pytest.mark.parametrize("how", REFUSED)
def test_saving_pickling_or_sharing_a_partitioned_parameter(how: str, trained: LitTiny) -> None:
    """It raises, and the error says how to export the model."""
    with pytest.raises(UnsupportedError, match=REMEDY):
        REFUSED[how](trained)


def test_an_array_of_a_partitioned_parameter_is_not_writeable(tmp_path: Path) -> None:
    """A write to it would be lost, so numpy refuses it, before any engine exists. Nor can the layer be pickled."""
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    with fabric.init_module():
        layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.detach().numpy()[0] = 0
    for value in (layer.weight, layer.state_dict()):
        with pytest.raises(UnsupportedError, match=REMEDY):
            pickle.dumps(value)


def test_a_copied_module_is_partitioned_and_trains_no_more(trained: LitTiny) -> None:
    """copy.deepcopy gives other parameters of the same values in 16 bit, which answer; the original stays."""
    copied = copy.deepcopy(trained.model)
    for own, other in zip(copied.parameters(), trained.model.parameters(), strict=True):
        assert own is not other and hasattr(own, "ds_id") and own.ds_id != other.ds_id  # type: ignore[attr-defined]
        assert torch.equal(own.detach().bfloat16(), other.detach().clone().bfloat16())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        expected = trained.model(tokens).clone()
        assert torch.equal(copied(tokens), expected)
        copied.head.weight.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(trained.model(tokens), expected)


# Ways in which a class may be pickled: as a call of itself, or with a state that is no dict.
STATES: dict[str, dict[str, Any]] = {
    "rebuilt": {"__reduce__": lambda self: (type(self), (self.in_features, self.out_features))},
    "a tuple": {
        "__getstate__": lambda self: (self.weight, self.bias),
        "__setstate__": lambda self, state: rebuild(self, *state),
    },
}


def rebuild(module: nn.Linear, weight: nn.Parameter, bias: nn.Parameter) -> None:
    nn.Linear.__init__(module, *reversed(weight.shape))
    module.weight, module.bias = weight, bias


@pytest.mark.parametrize("kind", STATES)
def test_a_module_with_its_own_pickling_is_copied(kind: str, tmp_path: Path) -> None:
    """copy.deepcopy and copy.copy do what the class says, and the module answers as before."""
    owned = type("Owned", (nn.Linear,), STATES[kind])
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    layer: Any = owned(8, 4)
    expected = layer.weight.detach().clone()
    fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    for copied in (copy.deepcopy(layer), copy.copy(layer)):
        assert (
            type(copied) is owned
            and copied.weight.shape == (4, 8)
            and (kind == "rebuilt") != torch.equal(copied.weight, expected)
            and copied(torch.ones(2, 8)).shape == (2, 4)
        )
    assert torch.equal(layer.weight, expected)
    copy.deepcopy(nn.Sequential(layer))


@pytest.mark.seam("moves_module: nothing is gathered", "torch.nn.Module._apply calls functions from its module.")
def test_moving_a_module_keeps_its_parameters(trained: LitTiny) -> None:
    """After Module.to and similar calls, ZeRO-3 still manages the parameters, and GatheredParameters gathers them."""
    model = trained.model
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = weight_of(trained).detach().clone()
    for moved in (model.cpu(), model.to("cpu"), model.bfloat16()):
        assert all(isinstance(param, nn.Parameter) and is_zero_param(param) for param in moved.parameters())
    with pytest.raises(UnsupportedError, match=r"torch.bfloat16 into torch.float64.*precision"):
        model.double()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(weight_of(trained), expected)


def test_gathered_parameters_are_saved_and_copied(trained: LitTiny) -> None:
    """Within GatheredParameters a saved, pickled or copied model has the weights, as usual."""
    file = io.BytesIO()
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        expected = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
        copied = copy.deepcopy(trained.model)
        torch.save(trained.model.state_dict(), file)
        assert torch.equal(pickle.loads(ForkingPickler.dumps(weight_of(trained))), weight_of(trained))
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, value in expected.items():
        assert value.numel() and torch.equal(copied.get_parameter(name), value) and torch.equal(saved[name], value)
    torch.save(copied.state_dict(), io.BytesIO())
    copy.deepcopy(copied)


Configure = Callable[[nn.Module], torch.optim.Optimizer]
Write = Callable[[Any], object]


class Written(Touched, pl.LightningModule):
    """Writes to parameters behind steps, or behind validations; weights are numbers of bf16 at first.

    Args:
        writes: Functions that are called one after the other. ``noted`` holds the values that a step behind each finds,
            ``found`` those at the end.
        times: How often each is called in a row.
        configure: Makes the optimizer; by default none of its steps changes a parameter.
        validated: Whether there are validations, behind which parameters are still whole.
    """

    def __init__(
        self,
        writes: dict[str, Write] | None = None,
        *,
        times: int = 1,
        configure: Configure | None = None,
        validated: bool = False,
    ) -> None:
        super().__init__()
        for param in self.parameters():
            param.data = param.data.bfloat16().float()
        self.writes, self.configure, self.validated = list((writes or {}).items()), configure or sgd, validated
        self.times, self.num_writes = times, 0
        self.noted: dict[str, Any] = {}
        self.found: dict[str, list[torch.Tensor]] = {}

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return ((self.net(batch) - 1) ** 2).mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net(batch), self.mean(batch)

    def on_train_batch_end(self, *args: object) -> None:
        if self.writes and not self.validated:
            self.write()

    def on_validation_end(self) -> None:
        if self.writes:
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        number, again = divmod(self.num_writes, self.times)
        if number and not again:
            self.noted[self.writes[(number - 1) % len(self.writes)][0]] = values(self)
        self.writes[number % len(self.writes)][1](self)
        self.num_writes += 1

    def on_train_end(self) -> None:
        self.found = self.noted["end"] = values(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.configure(self.net)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4 * len(WRITES), WIDTH), batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader() if self.validated else []


def values(module: Written) -> dict[str, list[torch.Tensor]]:
    """Return copies of the masters, of parameters that are not trained, and of tensors that are no parameters."""
    return {
        "net": [master(param).clone() for param in module.net.parameters()],
        "mean": [param.detach().float().clone() for param in module.mean.parameters()],
        "outside": [value.clone() for value in module.kept.get("mean", [])],
    }


def sgd(net: nn.Module, lr: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters in reverse order, with a group for each."""
    groups = [{"params": [param]} for param in reversed(list(net.parameters()))]
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)


def stepped_adam(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the state of one that has updated other parameters in memory."""
    optimizer = adam(net)
    optimizer.load_state_dict(stepped(adam(Touched().net)).state_dict())
    return optimizer


def round_to_parameters(module: Written) -> None:
    """Copy the parameters to the masters."""
    param = next(module.net.parameters())
    if hasattr(param, "ds_id"):
        param._z3_optimizer.refresh_fp32_params()
    else:
        for each in module.net.parameters():
            each.copy_(each.bfloat16())


SCALE = {"scale": WRITES["mul_ of data"]}
# Moments are those of AdamW.
BITS = {name: write for name, write in WRITES.items() if name != "moments"} | {"rounded": round_to_parameters}
# The first one in a process takes seconds.
COMPILED = {
    "compiled": lambda module: torch.compile(lambda own, its: own.lerp_(its, 0.5), backend="eager")(
        module.net[5].bias, module.mean[5].bias
    )
}


def ours(root: Path, place: str = "memory") -> SmartInfinityStrategy:
    """Return the strategy, with parameters in memory or on storage."""
    stored: Any = {"zero": {"offload_param": {"device": "nvme"}}, "transfer": TransferConfig(parameter_bytes="64KB")}
    # In fp16 no step overflows.
    return SmartInfinityStrategy(root / "storage", initial_scale_power=8, **(stored if place == "storage" else {}))


def fit_with_writes(root: Path, strategy: Any, place: str, **settings: Any) -> Written:
    """Return a module after a training with all writes, on ranks once each."""
    writes = BITS | (COMPILED if place == "memory" else {})
    module = Written(writes, times=1 if place == "ranks" else 2, validated=place == "validated")
    settings |= {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    fit(module, root, strategy, max_steps=module.times * len(writes), **settings)
    assert len(module.noted) == len(writes)
    return module


def assert_same_bits(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_all_noted(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Assert that the values behind each write have the same bits, in the order of the writes."""
    assert ours.keys() == theirs.keys()
    for name, found in theirs.items():
        torch.testing.assert_close(ours[name], found, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def is_rounded(found: list[torch.Tensor]) -> bool:
    """Return whether all values are numbers of bf16."""
    return all(torch.equal(value.bfloat16().float(), value) for value in found)


@pytest.mark.parametrize("place", ["memory", "storage", "validated"])
def test_writes_are_those_to_fp32_parameters(place: str, tmp_path: Path) -> None:
    """Masters, a teacher and a mean have the bits of fp32 arithmetic, with parameters in memory or on storage.

    After a validation parameters are still whole.
    """
    own, theirs = (fit_with_writes(tmp_path, strategy, place) for strategy in (ours(tmp_path, place), "auto"))
    assert_all_noted(own.noted, theirs.noted)


def train_on_ranks(root: Path) -> dict[str, Any]:
    """Return what is noted of all writes, what a second fit has, and what a resumed one has."""
    settings: dict[str, Any] = {"devices": 2, "use_distributed_sampler": False}
    module = fit_with_writes(root, ours(root), "ranks", **settings)
    noted, module.writes = dict(module.noted), []
    fit(module, root, ours(root), **settings)
    return {"noted": noted, "second fit": module.found, **whole_and_resumed(root, **settings)}


def whole_and_resumed(root: Path, **settings: Any) -> dict[str, Any]:
    """Return what is found by a training of four steps, and by one that is saved after two and resumed."""
    whole, begun, resumed = (Written({"follow": WRITES["lerp_"]}, configure=partial(sgd, lr=0.1)) for _ in range(3))
    fit(whole, root, ours(root), max_steps=4, **settings)
    fit(begun, root, ours(root), max_steps=2, **settings).save_checkpoint(root / "two.ckpt")
    trainer = quiet_trainer(root, ours(root), max_steps=4, **settings)
    trainer.fit(resumed, ckpt_path=root / "two.ckpt", weights_only=False)
    return {"whole": whole.found, "resumed": resumed.found}


def test_two_ranks_write_what_memory_writes(tmp_path: Path) -> None:
    """Each has its slices in fp32, whose sizes are not multiples of two, and a resumed training ends alike."""
    theirs = fit_with_writes(tmp_path, "auto", "ranks")
    for found in on_ranks(train_on_ranks, tmp_path):
        assert_all_noted(found["noted"], theirs.noted)
        assert_same_bits(found["second fit"], theirs.found)
        assert_same_bits(found["resumed"], found["whole"])


def test_a_teacher_resumes_with_every_bit(tmp_path: Path) -> None:
    """A training that is saved after the second step and resumed ends as one that never stopped, in fp16, too."""
    found = whole_and_resumed(tmp_path, precision="16-mixed")
    assert_same_bits(found["resumed"], found["whole"])
    assert not is_rounded(found["whole"]["mean"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_hooks_read_the_dtype_of_memory(precision: Any, tmp_path: Path) -> None:
    """In a mixed precision copies, norms and arrays are fp32, also of operations that torch lacks in 16 bit."""
    read: list[torch.Tensor] = []

    def note(module: Written) -> None:
        weight = module.net[0].weight
        read.extend([weight.clone(), weight.norm(), weight * 2, weight - module.mean[0].weight])
        read.extend([torch.zeros_like(weight), *(param.detach().clone() for param in module.mean.parameters())])
        if precision == "bf16-mixed":
            read.extend([torch.linalg.svdvals(weight), torch.quantile(weight, 0.5)])
            read.append(torch.from_numpy(weight.numpy().copy()))

    for strategy in ("auto", None):
        fit(Written({"read": note}), tmp_path / str(strategy), strategy, precision=precision)
    half = len(read) // 2
    torch.testing.assert_close(read[half:], read[:half], rtol=1e-5, atol=1e-6)  # and of the same dtypes


@pytest.mark.parametrize(("place", "configure"), [("memory", adam), ("storage", adam), ("memory", stepped_adam)])
def test_a_second_fit_goes_on_in_fp32(place: str, configure: Configure, tmp_path: Path) -> None:
    """Its masters are those of the first, also of what was written in between, by other groups and optimizers."""
    found: dict[bool, list[Any]] = {True: [], False: []}
    for is_ours in found:
        module = Written(SCALE)
        for number in range(3):
            fit(module, tmp_path, ours(tmp_path / str(number % 2), place) if is_ours else "auto")
            found[is_ours].append(module.found["net"])
            with torch.no_grad():
                module.net[5].weight.mul_(DECAY)
            module.writes, module.configure = [], configure
            gc.collect()
    assert_same_bits(found[True], found[False])
    assert not is_rounded(found[True][2])


@pytest.mark.parametrize("configure", [adam, stepped_adam])
def test_a_fit_goes_on_from_what_an_evaluation_wrote(configure: Configure, tmp_path: Path) -> None:
    """Its masters are the fp32 values that a hook wrote, also with an optimizer that has stepped before."""
    found = []
    for strategy in ("auto", ours(tmp_path)):
        module = Written(SCALE, configure=configure, validated=True)
        trainer = quiet_trainer(tmp_path, strategy, limit_val_batches=1)
        trainer.validate(module, verbose=False)
        module.writes = []
        trainer.fit(module)
        found.append(module.found["net"])
    assert_same_bits(*found)
    assert not is_rounded(found[1])


@pytest.mark.parametrize(("is_closed", "why"), [(True, "was closed"), (False, "No space left")])
def test_a_second_fit_whose_masters_are_gone(
    is_closed: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins from weights in 16 bit, and a warning says so and why."""
    module, strategy = Written(SCALE), ours(tmp_path)
    fit(module, tmp_path, strategy)
    first = module.found["net"]
    if is_closed:
        strategy.close()
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    module.writes = []
    with pytest.warns(UserWarning, match=rf"{why}.* rounded to torch.bfloat16, .* before the strategy is closed"):
        fit(module, tmp_path)
    assert_same_bits(module.found["net"], [value.bfloat16().float() for value in first])


def test_hooks_call_modules_with_fp32(tmp_path: Path) -> None:
    """Sample predictions in a hook take the inputs of memory."""

    class Sampling(Written):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv1d(1, 2, 3), nn.LayerNorm(6), nn.Flatten(), nn.Linear(12, 1))

        def sample(self, *_: Any) -> None:
            value = self.net(torch.ones(1, WIDTH)) + self.layers(torch.ones(1, 1, WIDTH))
            self.seen.append(value.detach().float())

        on_train_start = on_train_batch_end = sample

    theirs, own = Sampling(), Sampling()
    fit(theirs, tmp_path, "auto")
    fit(own, tmp_path)
    assert len(own.seen) == 4
    torch.testing.assert_close(own.seen, theirs.seen, rtol=3e-2, atol=3e-2)


def test_forward_reads_sixteen_bit(tmp_path: Path) -> None:
    """Within training_step a weight goes with activations; linear layers take fp32 inputs, as under autocast."""

    class Reading(Written):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            first, last = self.net[0], self.net[3].weight
            hidden = nn.functional.linear(first(batch).tanh(), last * 2)
            wide = nn.functional.linear(torch.ones(2, HIDDEN), last)
            rows = nn.functional.linear(last, torch.ones(2, HIDDEN).bfloat16(), first.bias[:2])
            behind = first(batch + torch.arange(WIDTH).float())
            whole = self(batch) + nn.functional.linear(torch.ones(2, HIDDEN), last)
            return hidden.mean() + wide.mean() + rows.mean() + behind.mean() + whole.mean()

    module = Reading(configure=partial(sgd, lr=0.1))
    strategy = SmartInfinityStrategy(tmp_path / "storage", zero={"stage3_param_persistence_threshold": 0})
    fit(module, tmp_path, strategy)
    weights = [param.ndim == 2 for param in module.net.parameters()]
    for is_weight, found, first in zip(weights, module.found["net"], Written().net.parameters(), strict=True):
        assert not is_weight or (found != first).any()

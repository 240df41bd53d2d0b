"""What torch's optimizers offer works as in memory, or is refused; Adagrad, SGD and RMSprop train like torch."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lightning_smartinfinity import ConfigError, UnsupportedError
from tests.helpers import reference
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.actions import does
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.test_parity import assert_near
from tests.training.worker import Run

# The recipe has what Lightning adds to a step and a parameter that some steps do not use. Clipping makes speculative
# updates wrong.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4)
ADAGRAD = dataclasses.replace(
    BASE, optimizer="Adagrad", clip=0.3, optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01}
)
PLAIN_SGD = dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None)
RMSPROP = dataclasses.replace(BASE, optimizer="RMSprop", optimizer_kwargs={"momentum": 0.9, "centered": True})
RECIPES = {
    "Adagrad": ADAGRAD,
    "Adagrad that maximizes": dataclasses.replace(ADAGRAD, lr=1e-4, optimizer_kwargs={"maximize": True}),
    "SGD": dataclasses.replace(PLAIN_SGD, optimizer_kwargs={"momentum": 0.9, "dampening": 0.2}),
    "SGD with nesterov": dataclasses.replace(PLAIN_SGD, optimizer_kwargs={"momentum": 0.9, "nesterov": True}),
    "SGD without momentum": PLAIN_SGD,
    "RMSprop": RMSPROP,
    "RMSprop without momentum": dataclasses.replace(RMSPROP, optimizer_kwargs={"centered": True}),
    "plain RMSprop": dataclasses.replace(RMSPROP, optimizer_kwargs={}),
}
ALL_OF_RMSPROP = {"step", "square_avg", "momentum_buffer", "grad_avg"}

USUAL = [
    ("Adagrad", "32-true", "forward"),
    ("SGD", "bf16-mixed", "backward"),
    ("SGD with nesterov", "32-true", "forward"),
    ("RMSprop", "32-true", "backward"),
    ("RMSprop", "bf16-mixed", "forward"),
]
CASES = [
    *USUAL,
    ("Adagrad", "bf16-mixed", "backward"),
    ("Adagrad that maximizes", "32-true", "forward"),
    ("SGD", "32-true", "backward"),
    ("SGD without momentum", "32-true", "backward"),
    ("RMSprop without momentum", "32-true", "backward"),
    ("plain RMSprop", "32-true", "forward"),
]


@pytest.mark.parametrize(("name", "precision", "overlap"), long_but(USUAL, CASES))
def test_trains_like_torch(name: str, precision: str, overlap: str, tmp_path: Path) -> None:
    """Losses and masters equal torch's; neither overlap nor a resume with another ring changes a bit.

    The state that torch's Adagrad builds at construction is removed. Speculative updates are kept or rolled back.
    """
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    # Updates take several tasklets.
    run = Run(out=str(tmp_path), recipe=recipe, transfer=SMALL_RING, options={"overlap": "none"}, save_at=(2,))
    straight = result(run)
    (losses, _, extra), masters = straight
    assert_near(losses, masters, reference.train(recipe), precision)
    assert extra["state_entries"] == 0
    overlapped = dataclasses.replace(
        run, out=str(tmp_path / "overlapped"), options={"overlap": overlap}, delays=0, save_at=()
    )
    assert_same(result(overlapped), straight)
    again = dataclasses.replace(overlapped, resume=str(tmp_path / "step-2.ckpt"), transfer={})
    (resumed, _, counted), ends = result(again)
    assert (resumed, counted["steps"], counted["lr"]) == (losses[2:], extra["steps"], extra["lr"])
    assert_equal(ends, masters)


def saved_state(checkpoint: Path) -> dict[int, dict[str, torch.Tensor]]:
    (file,) = checkpoint.rglob("*optim_states.pt")
    content = torch.load(file, weights_only=False)["optimizer_state_dict"]
    return content["optimizer_state_dict"]["state"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("Adagrad", {"step", "sum"}, {"step", "sum"}),
        ("SGD", set(), {"momentum_buffer"}),
        pytest.param("SGD without momentum", set(), set(), marks=pytest.mark.long),
        ("RMSprop", ALL_OF_RMSPROP, ALL_OF_RMSPROP),
        pytest.param("plain RMSprop", {"step", "square_avg"}, {"step", "square_avg"}, marks=pytest.mark.long),
    ],
)
def test_checkpoints_hold_what_torch_keeps(name: str, first: set[str], last: set[str], tmp_path: Path) -> None:
    """A checkpoint uses torch's names, also before the first step, from which training resumes to the same losses.

    DeepSpeed's tool finds the weights in it.
    """
    masters: dict[str, torch.Tensor] = {}

    def save(trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
        optimizer: Any = trainer.strategy.optimizers[0]
        masters.update((name, optimizer.get_full_hp_param(p).clone()) for name, p in module.model.named_parameters())

    module, again = LitTiny(RECIPES[name]), LitTiny(RECIPES[name])
    fit(module, tmp_path, precision="32-true", callbacks=[does(on_train_start=save, on_train_end=save)])
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "3.ckpt"))
    assert_equal({name: weights[f"model.{name}"] for name in masters}, masters)
    for step, names in ((0, first), (3, last)):
        found = saved_state(tmp_path / f"{step}.ckpt")
        assert {key for of_group in found.values() for key in of_group} == names, step
    if name == "Adagrad":
        assert all((state["sum"] == 0.01).all() for state in saved_state(tmp_path / "0.ckpt").values())
    quiet_trainer(tmp_path / "again", precision="32-true").fit(again, ckpt_path=tmp_path / "0.ckpt")
    assert again.losses == module.losses


@pytest.mark.parametrize(("name", "key"), [("Adagrad", "sum"), ("RMSprop without momentum", "momentum_buffer")])
def test_arrays_can_be_read_and_replaced(name: str, key: str, tmp_path: Path) -> None:
    """DeepSpeed's functions take torch's names; a momentum buffer that does not exist is an error, as in torch."""

    def double(trainer: pl.Trainer, module: Any) -> None:
        weight = module.model.head.weight
        if key == "momentum_buffer":
            with refused(ConfigError, "momentum", match="RMSprop has no 'momentum_buffer'"):
                safe_get_full_optimizer_state(weight, key)
        elif trainer.global_step == 1:
            before = safe_get_full_optimizer_state(weight, key)
            safe_set_full_optimizer_state(weight, before * 2, key)
            assert before.any() and torch.equal(safe_get_full_optimizer_state(weight, key), before * 2)

    module, plain = LitTiny(RECIPES[name]), LitTiny(RECIPES[name])
    fit(module, tmp_path, precision="32-true", callbacks=[does(on_train_batch_end=double)])
    fit(plain, tmp_path / "plain", precision="32-true")
    assert module.losses[:2] == plain.losses[:2] and (module.losses[2:] != plain.losses[2:]) == (key == "sum")


@pytest.mark.parametrize("name", long_but(["centered"], ["momentum", "centered"]))
def test_an_array_that_is_switched_off_survives_a_checkpoint(name: str, tmp_path: Path) -> None:
    """RMSprop's array counts again when its setting returns, in a resumed run as in one that never stopped."""
    checkpoint = tmp_path / "off.ckpt"

    def switch(trainer: pl.Trainer, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group[name] = 0 if trainer.global_step in (2, 3) else RMSPROP.optimizer_kwargs[name]

    def save(trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_step == 3 and not checkpoint.exists():
            trainer.save_checkpoint(checkpoint)

    runs = []
    for resumed in (None, checkpoint):
        module, callback = LitTiny(RMSPROP), does(on_train_batch_start=switch, on_train_batch_end=save)
        trainer = quiet_trainer(tmp_path / str(len(runs)), precision="32-true", max_steps=6, callbacks=[callback])
        trainer.fit(module, ckpt_path=resumed)
        runs.append(module.losses)
    assert len(runs[0]) == 6 and runs[1] == runs[0][3:]


DATA = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
Make = Callable[[Any], torch.optim.Optimizer]
Act = Callable[[Any, "Net"], Any]


class Net(pl.LightningModule):
    """Two layers, of which the second has a loss of its own in the first batches; it notes what was seen."""

    def __init__(self, make: Make, during: Act, *, manual: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.rare = nn.Linear(4, 1)
        self.make, self.during, self.automatic_optimization = make, during, not manual
        self.seen: list[Any] = []

    def loss(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = ((self.layers(batch) - 1) ** 2).mean()
        if batch_idx in (0, 1, 3):
            loss = loss + (self.rare(batch) ** 2).mean()
        self.seen.append(float(loss.detach()))
        return loss  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.seen.append(self.during(self.optimizers(), self))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch, batch_idx)
        optimizer: Any = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = self.loss(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        self.seen.append(float(optimizer.step(closure=closure)))
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self)


def trained(make: Make, during: Act, root: Path, *, ours: bool = True, manual: bool = True) -> list[Any]:
    module = Net(make, during, manual=manual)
    settings: Any = {"precision": "32-true", "use_distributed_sampler": False, "max_epochs": 1}
    quiet_trainer(root, None if ours else "auto", **settings).fit(module, DataLoader(DATA, batch_size=4))
    return module.seen


def nothing(optimizer: Any, net: Net) -> None:
    pass


def adamw(net: Net) -> torch.optim.Optimizer:
    return AdamW(net.parameters(), lr=1e-2)


def with_hooks(net: Net) -> torch.optim.Optimizer:
    optimizer = stepped(AdamW)(net)

    def before(given: Any, args: Any, kwargs: Any) -> None:
        given.param_groups[0]["lr"] *= 1.3
        net.seen.append(given is args[0] is optimizer)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda given, *_: net.seen.append(given.param_groups[0]["lr"]))
    return optimizer


def with_tensors(net: Net) -> torch.optim.Optimizer:
    return AdamW(net.named_parameters(), lr=torch.tensor(1e-2), betas=(torch.tensor(0.9), torch.tensor(0.99)))


def stepped(kind: Any, **settings: Any) -> Make:
    """Make an optimizer that has updated all parameters but one, twice."""

    def make(net: Net) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(net.parameters(), lr=1e-2, **settings)
        for param in list(net.parameters())[:-1]:
            param.grad = torch.linspace(-1, 1, param.numel()).reshape(param.shape)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return make


def loaded(net: Net) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    optimizer.load_state_dict(stepped(AdamW)(Net(adamw, nothing)).state_dict())
    return optimizer


def change(**settings: Any) -> Act:
    return lambda optimizer, net: optimizer.param_groups[0].update(settings)


def late_hook(optimizer: Any, net: Net) -> None:
    optimizer.optimizer.register_step_pre_hook(lambda given, *_: net.seen.append(type(given).__name__))


def in_place(optimizer: Any, net: Net) -> Any:
    optimizer.param_groups[0]["lr"].mul_(3)
    return optimizer.param_groups[0]["param_names"]


def looks(optimizer: Any, net: Net) -> Any:
    (group,) = optimizer.param_groups
    return [p is q for p, q in zip(group["params"], net.parameters(), strict=True)], sorted(optimizer.defaults.items())


WORKS: dict[str, tuple[Make, Act]] = {
    "hooks": (with_hooks, late_hook),
    "tensors": (with_tensors, in_place),
    "a state that was loaded": (loaded, looks),
    "stepped Adam": (stepped(Adam, weight_decay=0.1), nothing),
    "stepped SGD": (stepped(SGD, momentum=0.9), change(momentum=0.5, nesterov=True)),
    "stepped RMSprop": (stepped(RMSprop, momentum=0.5, centered=True), nothing),
    "stepped Adagrad": (stepped(Adagrad, initial_accumulator_value=0.1), nothing),
    "settings": (adamw, change(lr=0.05, betas=(0.5, 0.6), eps=1e-2, weight_decay=0.3, lr_scale=3, foreach=True)),
}


@pytest.fixture
def global_hooks() -> Iterator[list[str]]:
    called: list[str] = []
    handles = (
        register_optimizer_step_pre_hook(lambda *_: called.append("before")),
        register_optimizer_step_post_hook(lambda *_: called.append("after")),
    )
    yield called
    for handle in handles:
        handle.remove()


@pytest.mark.seam("there is none in memory", "Strategy.teardown moves the state of Strategy._optimizers to the CPU.")
@pytest.mark.seam(
    "hooks around our step; refusing those that would not be called",
    "Torch has Optimizer._optimizer_step_pre_hooks, ``_optimizer_<kind>_hooks``, "
    "torch.optim.optimizer._global_optimizer_pre_hooks, and the mark _wrapped_by_lr_sched of a scheduler's step.",
)
@pytest.mark.parametrize(("case", "manual"), [("hooks", False), *((case, True) for case in WORKS)])
def test_it_trains_as_in_memory(case: str, manual: bool, global_hooks: list[str], tmp_path: Path) -> None:
    """Losses and the arguments of hooks are those of plain torch, and its global hooks are called once a step.

    Manual loops pass closures, and zero gradients in place. Hooks before the step are called after the closure, as
    torch's GradScaler calls them in fp16. Optimizers may have hooks, an earlier state and changed settings.
    """
    make, during = WORKS[case]
    ours, plain = (trained(make, during, tmp_path, ours=is_ours, manual=manual) for is_ours in (True, False))
    assert _floats(ours) == pytest.approx(_floats(plain), rel=2e-4)
    assert [each for each in ours if not isinstance(each, float)] == [e for e in plain if not isinstance(e, float)]
    half = len(global_hooks) // 2
    assert half >= 12 and global_hooks[half:] == global_hooks[:half]


def _floats(seen: list[Any]) -> list[float]:
    return [each for each in seen if isinstance(each, float)]


REFUSED: dict[str, tuple[Act, str]] = {
    "state of a parameter": (lambda optimizer, net: optimizer.state[net.rare.weight], "safe_get_full_optimizer_state"),
    "states": (lambda optimizer, net: len(optimizer.state), "AdamW.state was read"),
    "no state": (lambda optimizer, net: optimizer.state.clear(), "AdamW.state was read"),
    "another state": (
        lambda optimizer, net: setattr(optimizer.optimizer, "state", {}),
        "safe_set_full_optimizer_state",
    ),
    "state_dict": (lambda optimizer, net: optimizer.state_dict(), "trainer.save_checkpoint"),
    "load_state_dict": (lambda optimizer, net: optimizer.load_state_dict({}), "fit\\(ckpt_path=path\\)"),
    "a hook of state_dict": (lambda optimizer, net: optimizer.register_state_dict_post_hook(print), "state_dict"),
    "add_param_group": (lambda optimizer, net: optimizer.add_param_group({"params": [net.rare.bias]}), "on_fit_start"),
    "a copy": (lambda optimizer, net: copy.deepcopy(optimizer.optimizer), "Copying or pickling"),
}


REFUSED_BY_THE_STEP: dict[str, tuple[Act, str]] = {
    "fewer parameters": (lambda optimizer, net: optimizer.param_groups[0]["params"].pop(), "requires_grad_"),
    "fewer groups": (lambda optimizer, net: optimizer.param_groups.clear(), "0 parameter groups, and had 1"),
}


@pytest.mark.parametrize("what", REFUSED_BY_THE_STEP)
def test_what_cannot_work_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """In memory each of these works, or changes what is trained."""

    def try_all(optimizer: Any, net: Net) -> None:
        for act, message in REFUSED.values():
            with pytest.raises(UnsupportedError, match=message):
                act(optimizer, net)
        change(optimizer, net)

    change, by_the_step = REFUSED_BY_THE_STEP[what]
    with pytest.raises(UnsupportedError, match=by_the_step):
        trained(adamw, try_all, tmp_path)


def test_the_users_optimizer_is_what_every_call_returns(tmp_path: Path) -> None:
    """It is an AdamW, before the first step its state is empty, and its own step trains."""
    module = Net(lambda _: optimizer, nothing)
    optimizer = adamw(module)

    def training_step(batch: torch.Tensor, batch_idx: int) -> None:
        assert (
            module.optimizers(use_pl_optimizer=False) is optimizer is trainer.optimizers[0]
            and isinstance(module.optimizers(), AdamW)
            and type(optimizer).__name__ == "AdamW"
        )
        assert batch_idx or (len(optimizer.state) == 0 and module.rare.weight not in optimizer.state)
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch, batch_idx))
        optimizer.step()

    module.training_step = training_step  # type: ignore[method-assign]
    trainer = quiet_trainer(tmp_path, precision="32-true", max_epochs=1)
    trainer.fit(module, DataLoader(DATA[:4].repeat(3, 1), batch_size=4))
    assert module.seen[1] < module.seen[0]

"""What torch's optimizers offer works as in memory, or is refused by name, in Trainer, Fabric and transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.fabric import Fabric
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.fabric.worker import quiet_fabric
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.huggingface.trained import arguments, calling

DATA = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
Make = Callable[[Any], torch.optim.Optimizer]
Act = Callable[[Any, "Net"], Any]


class Net(nn.Module):
    """Two layers, of which the second has a loss of its own in the first batches; it notes what was seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.rare = nn.Linear(4, 1)
        self.seen: list[Any] = []
        self.steps = 0

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        loss = ((self.layers(x) - 1) ** 2).mean()
        if self.steps in (0, 1, 3):
            loss = loss + (self.rare(x) ** 2).mean()
        self.steps += 1
        self.seen.append(float(loss.detach()))
        return {"loss": loss}

    def act(self, during: Act, optimizer: Any) -> None:
        if self.steps == 2:
            self.seen.append(during(optimizer, self))


class Lit(pl.LightningModule):
    """The net in automatic optimization, or in a manual loop."""

    def __init__(self, make: Make, during: Act, manual: bool) -> None:
        super().__init__()
        self.net, self.make, self.during = Net(), make, during
        self.automatic_optimization = not manual

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.net.act(self.during, self.optimizers())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        if self.automatic_optimization:
            return self.net(batch)["loss"]

        def closure() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = self.net(batch)["loss"]
            self.manual_backward(loss)
            return loss  # type: ignore[no-any-return]

        self.net.seen.append(float(optimizer.step(closure=closure)))
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.net)


def in_trainer(make: Make, during: Act, root: Path, *, ours: bool, manual: bool = False) -> list[Any]:
    module = Lit(make, during, manual)
    settings: Any = {"precision": "32-true", "use_distributed_sampler": False, "max_epochs": 1}
    quiet_trainer(root, None if ours else "auto", **settings).fit(module, DataLoader(DATA, batch_size=4))
    return module.net.seen


def in_manual_loop(make: Make, during: Act, root: Path, *, ours: bool) -> list[Any]:
    return in_trainer(make, during, root, ours=ours, manual=True)


def in_fabric(make: Make, during: Act, root: Path, *, ours: bool) -> list[Any]:
    fabric = quiet_fabric(root) if ours else Fabric(accelerator="cpu", devices=1)
    net = Net()
    model, optimizer = fabric.setup(net, make(net))
    for batch in DATA.split(4):
        net.act(during, optimizer)
        optimizer.zero_grad(set_to_none=False)
        fabric.backward(model(batch)["loss"])
        optimizer.step()
    if ours:
        fabric.strategy.close()
    return net.seen


def in_transformers(make: Make, during: Act, root: Path, *, ours: bool) -> list[Any]:
    with SmartInfinityTraining(storage=root / "s") if ours else nullcontext() as training:
        args = arguments(
            root / "out",
            training and training.config,
            per_device_train_batch_size=4,
            max_steps=6,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            **({} if ours else {"use_cpu": True}),
        )
        net = Net()
        acting = calling(on_step_begin=lambda *_, optimizer, **__: net.act(during, optimizer))
        data, optimizers = [{"x": row} for row in DATA], (make(net), None)
        trainer = transformers.Trainer(net, args, train_dataset=data, optimizers=optimizers, callbacks=[acting])
        trainer.train()
        return net.seen


DOORS = {door.__name__: door for door in (in_trainer, in_manual_loop, in_fabric, in_transformers)}


def nothing(optimizer: Any, net: Net) -> None:
    pass


def adamw(net: Net) -> torch.optim.Optimizer:
    return AdamW(net.parameters(), lr=1e-2)


def with_hooks(net: Net) -> torch.optim.Optimizer:
    optimizer = stepped_with_hook(net)
    optimizer.register_step_pre_hook(lambda given, args, kwargs: net.seen.append(given is args[0] is optimizer))
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


def stepped_with_hook(net: Net) -> torch.optim.Optimizer:
    optimizer = stepped(AdamW)(net)

    def before(given: Any, *_: Any) -> None:
        given.param_groups[0]["lr"] *= 1.3
        net.seen.append("before")

    optimizer.register_step_pre_hook(before)
    return optimizer


def loaded(net: Net) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    optimizer.load_state_dict(stepped(AdamW)(Net()).state_dict())
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
ELSEWHERE = ("hooks", "a state that was loaded")


@pytest.mark.seam("there is none in memory", "Strategy.teardown moves the state of Strategy._optimizers to the CPU.")
@pytest.mark.seam(
    "hooks around our step; refusing those that would not be called",
    "Torch has Optimizer._optimizer_step_pre_hooks, ``_optimizer_<kind>_hooks``, "
    "torch.optim.optimizer._global_optimizer_pre_hooks, and the mark _wrapped_by_lr_sched of a scheduler's step.",
)
@pytest.mark.parametrize(
    ("door", "case"),
    [(door, case) for door in DOORS for case in (WORKS if door == "in_manual_loop" else ELSEWHERE)],
)
def test_it_trains_as_in_memory(door: str, case: str, tmp_path: Path) -> None:
    """Losses and what hooks see are those of plain torch. Manual loops pass closures, and zero gradients in place.

    Hooks before the step are called after the closure, as torch's GradScaler calls them in fp16.
    """
    make, during = WORKS[case]
    ours, plain = (DOORS[door](make, during, tmp_path, ours=is_ours) for is_ours in (True, False))
    assert _floats(ours) == pytest.approx(_floats(plain), rel=2e-4)
    assert [each for each in ours if not isinstance(each, float)] == [e for e in plain if not isinstance(e, float)]


def _floats(seen: list[Any]) -> list[float]:
    return [each for each in seen if isinstance(each, float)]


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


@pytest.mark.parametrize("door", DOORS)
def test_torchs_global_hooks_are_called_once_a_step(door: str, global_hooks: list[str], tmp_path: Path) -> None:
    """A step has one call of each."""
    DOORS[door](adamw, nothing, tmp_path, ours=True)
    assert global_hooks == ["before", "after"] * 6


def resets_state(optimizer: Any, net: Net) -> None:
    while hasattr(optimizer, "optimizer") and optimizer.optimizer is not optimizer:  # a wrapper of Lightning's
        optimizer = optimizer.optimizer
    optimizer.state = {}


REFUSED: dict[str, tuple[Act, str]] = {
    "state of a parameter": (lambda optimizer, net: optimizer.state[net.rare.weight], "safe_get_full_optimizer_state"),
    "states": (lambda optimizer, net: len(optimizer.state), "AdamW.state was read"),
    "no state": (lambda optimizer, net: optimizer.state.clear(), "AdamW.state was read"),
    "another state": (resets_state, "safe_set_full_optimizer_state"),
    "state_dict": (lambda optimizer, net: optimizer.state_dict(), "trainer.save_checkpoint"),
    "load_state_dict": (lambda optimizer, net: optimizer.load_state_dict({}), "fit\\(ckpt_path=path\\)"),
    "a hook of state_dict": (lambda optimizer, net: optimizer.register_state_dict_post_hook(print), "state_dict"),
    "add_param_group": (lambda optimizer, net: optimizer.add_param_group({"params": [net.rare.bias]}), "on_fit_start"),
    "fewer parameters": (lambda optimizer, net: optimizer.param_groups[0]["params"].pop(), "requires_grad_"),
    "fewer groups": (lambda optimizer, net: optimizer.param_groups.clear(), "0 parameter groups, and had 1"),
    "a copy": (lambda optimizer, net: copy.deepcopy(optimizer.optimizer), "Copying or pickling"),
}


@pytest.mark.parametrize(("door", "what"), [("in_trainer", what) for what in REFUSED] + [("in_fabric", "states")])
def test_what_cannot_work_is_refused_by_name(door: str, what: str, tmp_path: Path) -> None:
    """In memory each of these works, or changes what is trained."""
    during, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        DOORS[door](adamw, during, tmp_path, ours=True)


def with_own_step(net: Net) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


def with_state_hook(net: Net) -> torch.optim.Optimizer:
    optimizer = adamw(net)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    return optimizer


def with_foreign_state(net: Net) -> torch.optim.Optimizer:
    optimizer = stepped(AdamW, amsgrad=True)(net)
    optimizer.param_groups[0]["amsgrad"] = False
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_own_step, "AdamW.step was replaced"),
        (with_state_hook, "register_load_state_dict_pre_hook"),
        (with_foreign_state, "'max_exp_avg_sq'"),
    ],
)
def test_an_optimizer_that_would_lose_something_is_refused(make: Make, message: str, tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(UnsupportedError, match=message):
        in_trainer(make, nothing, tmp_path, ours=True)
    assert not list(tmp_path.rglob("*.bin"))


def test_the_users_optimizer_is_what_every_call_returns(tmp_path: Path) -> None:
    """It is an AdamW, before the first step its state is empty, and its own step trains."""
    made: list[Any] = []

    def make(net: Net) -> torch.optim.Optimizer:
        made.append(adamw(net))
        return made[0]  # type: ignore[no-any-return]

    trainer = quiet_trainer(tmp_path, precision="32-true", max_epochs=1)
    module = Lit(make, nothing, manual=True)

    def training_step(batch: torch.Tensor, batch_idx: int) -> None:
        assert module.optimizers(use_pl_optimizer=False) is made[0] is trainer.optimizers[0]
        assert isinstance(module.optimizers(), AdamW) and type(made[0]).__name__ == "AdamW"
        if batch_idx == 0:
            assert len(made[0].state) == 0 and module.net.rare.weight not in made[0].state
        made[0].zero_grad()
        module.manual_backward(module.net(batch)["loss"])
        made[0].step()

    module.training_step = training_step  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(DATA[:4].repeat(3, 1), batch_size=4))
    assert module.net.seen[1] < module.net.seen[0]


def train_on_ranks(root: Path) -> tuple[list[float], int]:
    """Return the mean losses of both ranks, and how often this one's hook was called."""
    fabric = quiet_fabric(root / "storage", devices=2)
    net = Net()
    model, optimizer = fabric.setup(net, stepped_with_hook(net))
    losses = []
    for batch in DATA.split(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch.chunk(2)[fabric.global_rank])["loss"]
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        fabric.backward(loss)
        optimizer.step()
    fabric.strategy.close()
    return losses, net.seen.count("before")


def test_hooks_and_an_earlier_state_in_two_processes(tmp_path: Path) -> None:
    """Each process calls the hooks, and takes its part of the state: losses are those of one process in memory."""
    plain = in_fabric(stepped_with_hook, nothing, tmp_path, ours=False)
    for losses, num_called in on_ranks(train_on_ranks, tmp_path):
        assert losses == pytest.approx(_floats(plain), rel=2e-4)
        assert num_called == plain.count("before") == 6

"""Code that touches parameters and gradients outside of forward.

:mod:`tests.training.test_everyday_code` runs each function of a table in a small training, in memory or by us, through
each of our doors.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

WIDTH, HIDDEN, STEPS_PER_TERM = 8, 17, 2  # HIDDEN is odd, so that processes get unequal parts
DECAY = 0.999


class Touched(nn.Module):
    """A network with a frozen mean of its own weights.

    Args:
        *args: Arguments of the next class.
        terms: Whether losses have terms; otherwise hooks run the other tables.
        late: Whether somebody else calls ``build``.

    Attributes:
        seen: What the functions of the tables returned, and the losses, as plain numbers.
        kept: What functions keep for later ones.
    """

    def __init__(self, *args: Any, terms: bool = False, late: bool = False) -> None:
        super().__init__(*args)
        self.terms = terms
        self.seen: list[Any] = []
        self.kept: dict[str, Any] = {}
        if not late:
            self.build()

    def build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 6), nn.Tanh(), nn.Linear(6, 1)
        )
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def make_optimizer(module: Touched) -> torch.optim.Optimizer:
    """Return an optimizer with two groups, hooks, and the state of one that has stepped in memory."""
    matrices = [param for param in module.net.parameters() if param.ndim >= 2]
    others = [param for param in module.net.parameters() if param.ndim < 2]
    module.seen.append((len(matrices), len(others), sum(param.numel() for param in module.parameters())))
    groups = [{"params": matrices, "weight_decay": 0.3, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    optimizer.load_state_dict(stepped(of_zeros(optimizer)).state_dict())
    module.kept["optimizer"] = optimizer
    optimizer.register_step_pre_hook(lambda given, *_: scale_rates(given, 1.01))
    optimizer.register_step_post_hook(lambda given, *_: module.seen.append(given.param_groups[0]["lr"]))
    return optimizer


def of_zeros(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of parameters in memory that have the same shapes."""
    zeros = [
        {**group, "params": [nn.Parameter(torch.zeros(param.shape)) for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    return torch.optim.AdamW(zeros)


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let an optimizer of parameters in memory step with gradients of ones."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= factor


def batches(terms: bool) -> list[torch.Tensor]:
    """Return the data of a training whose loss has terms, or which runs the other tables."""
    number = STEPS_PER_TERM * len(TERMS) if terms else len(WRITES) + 2
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(number)]


def loss_of(
    module: Touched, forward: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor, step: int
) -> torch.Tensor:
    """Return a loss, with the term of the step if terms are asked for."""
    name = list(TERMS)[step // STEPS_PER_TERM] if module.terms else ""
    before = TERMS[name](module) if name.startswith("before") else 0
    weight = module.net[3].weight  # looked up before the forward that releases it
    with autocast() if name == "autocast" else nullcontext():
        loss = ((forward(batch) - 1) ** 2).mean() + before
    if name and not name.startswith("before"):
        loss = loss + TERMS[name](module)
    if name == "before":
        loss = loss + (weight @ weight.T).square().sum() * 0.01
    module.seen.append((name, float(loss.detach())))
    return loss


@contextmanager
def autocast() -> Iterator[None]:
    """Compute in bf16. On a CPU, too, DeepSpeed asks whether the autocast of CUDA is on."""
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def between_backward_and_step(module: Touched, step: int) -> None:
    if not module.terms:
        name = list(GRADIENTS)[step % len(GRADIENTS)]
        module.seen.append((name, GRADIENTS[name](module)))


@torch.no_grad()
def after_step(module: Touched, step: int) -> None:
    names = [] if module.terms else list(WRITES)
    if step < len(names):
        WRITES[names[step]](module)
        module.seen.append((names[step], sums(module)))
    elif step == len(names) and not module.terms:
        module.seen.extend((name, read(module)) for name, read in READS.items())


def sums(module: Touched) -> list[float]:
    """Return the sum of the squares of each parameter."""
    return [float(param.detach().square().sum()) for param in module.parameters()]


def _keep(module: Touched) -> None:
    module.kept["state"] = {name: value.clone() for name, value in module.net.state_dict().items()}
    module.kept["alias"] = module.net[0].weight.data


def _average(module: Touched) -> None:
    average = AveragedModel(module.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    average.update_parameters(module.net)
    module.net[0].weight.mul_(1.5)
    average.update_parameters(module.net)
    module.mean.load_state_dict(average.module.state_dict())


def saved_and_loaded(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def _copy_whole(module: Touched) -> None:
    copied = copy.deepcopy(module.net)
    copied[0].weight.fill_(0.25)
    module.mean[0].weight.copy_(copied[0].weight)
    module.kept["forward"] = float(copied(torch.ones(3, WIDTH)).sum())


def _draw(module: Touched) -> None:
    torch.manual_seed(3)
    nn.init.normal_(module.net[0].weight, std=0.1)
    module.net[0].weight.data[1].uniform_()
    nn.init.orthogonal_(module.net[3].weight)  # which torch lacks in 16 bit


def _follow_outside(module: Touched) -> None:
    """Average in tensors that are no parameters, by lists, and as latent diffusion's LitEma does."""
    shadow = module.kept.setdefault("mean", [torch.zeros(param.shape) for param in module.net.parameters()])
    torch._foreach_lerp_(shadow, [param.detach() for param in module.net.parameters()], 1 - DECAY)
    shadow[1].copy_(module.net[0].bias.detach())
    own = shadow[0].type_as(module.net[0].weight)
    assert own is shadow[0] and shadow[0].to(module.net[0].weight.data) is own
    own.sub_((1 - DECAY) * (own - module.net[0].weight))


def is_partitioned(param: nn.Parameter) -> bool:
    return hasattr(param, "ds_id")


def gathered(params: list[nn.Parameter]) -> Any:
    """Gather parameters by DeepSpeed's context, in which the first process may write."""
    return deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=is_partitioned(params[0]))


def _write_gathered(module: Touched) -> None:
    with gathered([*module.net.parameters(), *module.mean.parameters()]):
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            module.net[0].weight[3:7] = 0.25
            module.net[2].weight.fill_(1.25)
            module.mean[3].weight.zero_()


def _only_gather(module: Touched) -> None:
    with gathered(list(module.net.parameters())):
        pass


def _set_masters(module: Touched) -> None:
    weight, bias = module.net[3].weight, module.net[3].bias
    if is_partitioned(weight):
        safe_set_full_fp32_param(weight, torch.full(tuple(weight.shape), 0.1001))
        safe_set_local_fp32_param(bias, torch.full_like(safe_get_local_fp32_param(bias), 0.3))
    else:
        weight.fill_(0.1001)
        bias.fill_(0.3)


def master(param: nn.Parameter) -> torch.Tensor:
    return safe_get_full_fp32_param(param) if is_partitioned(param) else param.detach()  # type: ignore[no-any-return]


def _change_moments(module: Touched) -> None:
    for param in module.net[3].parameters():
        if is_partitioned(param):
            safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, "exp_avg") * 0.5, "exp_avg")
            second = safe_get_local_optimizer_state(param, "exp_avg_sq") * 2
            safe_set_local_optimizer_state(param, second, "exp_avg_sq")
        else:
            module.kept["optimizer"].state[param]["exp_avg"].mul_(0.5)
            module.kept["optimizer"].state[param]["exp_avg_sq"].mul_(2)


def moment(module: Touched, param: nn.Parameter) -> torch.Tensor:
    if is_partitioned(param):
        return safe_get_full_optimizer_state(param, "exp_avg_sq")  # type: ignore[no-any-return]
    return module.kept["optimizer"].state[param]["exp_avg_sq"]  # type: ignore[no-any-return]


def _change_gradients(module: Touched) -> None:
    first, second, third = module.net[0].weight, module.net[0].bias, module.net[3].weight
    if is_partitioned(first):
        safe_set_full_grad(first, safe_get_full_grad(first) * 0.5)
        safe_set_local_grad(second, safe_get_local_grad(second) * 3)
        safe_update_full_grad_vectorized([third], lambda gradient, param: gradient * 2)
    else:
        for param, factor in ((first, 0.5), (second, 3), (third, 2)):
            param.grad.mul_(factor)


def gradient(param: nn.Parameter) -> Any:
    return safe_get_full_grad(param) if is_partitioned(param) else param.grad


def _swap(module: Touched) -> None:
    for mean, own in _pairs(module):
        mean.data, own.data = own.data, mean.data


def _pairs(module: Touched) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(module.mean.parameters(), module.net.parameters(), strict=True))


WRITES: dict[str, Callable[[Touched], object]] = {
    "mul_ of data": lambda m: [param.data.mul_(DECAY) for param in m.net.parameters()],
    "foreach of data": lambda m: torch._foreach_mul_([param.data for param in m.net.parameters()], DECAY),
    "lerp_": lambda m: [mean.lerp_(own, 0.5) for mean, own in _pairs(m)],
    "mul_ and add_ of data": lambda m: [mean.data.mul_(0.5).add_(own.data, alpha=0.5) for mean, own in _pairs(m)],
    "foreach": lambda m: torch._foreach_lerp_(list(m.mean.parameters()), list(m.net.parameters()), 0.5),  # type: ignore[attr-defined]
    "a mean of tensors": _follow_outside,
    "clamp_": lambda m: [param.clamp_(-0.3, 0.3) for param in m.net.parameters()],
    "one row": lambda m: m.net[0].weight.__setitem__(slice(2, 4), 0.5),
    "every third row": lambda m: m.net[0].weight.data[2:14:3].mul_(DECAY),
    "columns": lambda m: m.net[0].weight[:, 2:4].add_(1e-4),
    "a row of the transpose": lambda m: m.net[0].weight.T[0].clamp_(-0.01, 0.01),
    "a mask": lambda m: m.net[3].weight.__setitem__(m.net[3].weight > 0.1, 0.1),
    "a slice": lambda m: m.net[0].weight.data.__setitem__(slice(2, 4), 0.1),
    "an integer": lambda m: (  # bf16 has no 257
        m.net[0].weight.data.__setitem__(slice(2, 4), 257),
        m.net[0].weight.data[2:4].sub_(256.9),
    ),
    "masked_scatter_": lambda m: m.net[3].weight.masked_scatter_(
        m.net[3].weight < -0.1, torch.full((6 * HIDDEN,), -1 / 7)
    ),
    "a column of data": lambda m: m.net[0].weight.data[:, 1].zero_(),
    "nn.init": lambda m: nn.init.constant_(m.net[3].bias, 0.1),
    "random numbers": _draw,
    "data assigned": lambda m: setattr(m.net[5].weight, "data", m.net[5].weight.data * 0.5),
    "data swapped": _swap,
    "set_": lambda m: m.net[3].bias.set_(torch.full((6,), 0.3)),
    "index_fill_": lambda m: m.net[0].weight.index_fill_(0, torch.tensor([5]), 0.2),
    "index_copy_": lambda m: m.net[0].weight.index_copy_(0, torch.tensor([7]), torch.full((1, WIDTH), 1 / 3)),
    "addmm_": lambda m: m.net[0].weight.addmm_(torch.full((HIDDEN, 2), DECAY), torch.full((2, WIDTH), 1e-3)),
    "out=": lambda m: torch.mul(m.net[3].weight.data, 0.9, out=m.net[3].weight.data),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.net.parameters()) * 0.9, m.net.parameters()
    ),
    "a norm": lambda m: m.net[0].weight.div_(m.net[0].weight.norm(dim=1, keepdim=True).clamp_(min=1.0)),
    "copied back": lambda m: [param.copy_(param.detach().clone()) for param in m.net.parameters()],
    "in gathered parameters": _write_gathered,
    "nothing in gathered parameters": _only_gather,
    "masters": _set_masters,
    "moments": _change_moments,
    "keep": _keep,
    "a kept alias": lambda m: m.kept["alias"].mul_(0.5),
    "restore": lambda m: m.net.load_state_dict(m.kept["state"]),
    "a scaled state dict": lambda m: m.mean.load_state_dict(
        {name: value.float() * DECAY for name, value in m.net.state_dict().items()}
    ),
    "AveragedModel": _average,
    "deepcopy of a module": _copy_whole,
    "reset_parameters": lambda m: (torch.manual_seed(3), m.net[3].reset_parameters()),
}

READS: dict[str, Callable[[Touched], object]] = {
    "shapes": lambda m: [
        (tuple(p.shape), p.ndim, p.numel(), p.size(0), len(p), p.stride()) for p in m.net.parameters()
    ],
    "norm": lambda m: float(m.net[0].weight.norm()),
    "total norm": lambda m: float(nn.utils.get_total_norm(list(m.net.parameters()))),
    "item": lambda m: m.net[0].weight[1, 2].item(),
    "comparison": lambda m: bool((m.net[0].weight == m.net[0].weight.clone()).all()),
    "numpy": lambda m: float(np.asarray(m.net[0].weight.detach()).sum()),
    "tolist": lambda m: m.net[5].bias.tolist(),
    "copies": lambda m: [float(c.sum()) for w in [m.net[0].weight.detach()] for c in (w.cpu(), copy.deepcopy(w))],
    "saved": lambda m: float(saved_and_loaded({"weight": m.net[0].weight.data.cpu()})["weight"].double().sum()),
    "histogram": lambda m: torch.histc(m.net[0].weight, 4).tolist(),
    "cat": lambda m: float(torch.cat([p.flatten() for p in m.parameters()]).sum()),
    "views": lambda m: float(m.net[0].weight.T[1:3].reshape(-1)[::2].sum()),
    "unbind": lambda m: [float(row.sum()) for row in m.net[3].weight],
    "split": lambda m: [tuple(part.shape) for part in m.net[0].weight.split(5)],
    "matmul": lambda m: float((m.net[3].weight @ m.net[3].weight.T).trace()),
    "svd": lambda m: torch.linalg.svdvals(m.net[3].weight).tolist(),
    "state dict": lambda m: {name: float(value.sum()) for name, value in m.net.state_dict().items()},
    "functional": lambda m: float(nn.functional.linear(torch.ones(1, WIDTH), m.net[0].weight, m.net[0].bias).sum()),
    "zeros_like": lambda m: tuple(torch.zeros_like(m.net[0].weight).shape),
    "dtype and device": lambda m: (str(m.net[0].weight.dtype), str(m.net[0].weight.device), m.net[0].weight.is_leaf),
    "any nan": lambda m: any(bool(torch.isnan(p).any()) for p in m.parameters()),
    "a mean of tensors": lambda m: [mean.tolist() for mean in m.kept["mean"]],
    "masters": lambda m: [float(master(param).sum()) for param in m.net.parameters()],
    "moments": lambda m: [float(moment(m, param).sum()) for param in m.net.parameters()],
    "the copied module": lambda m: m.kept["forward"],
}

GRADIENTS: dict[str, Callable[[Touched], object]] = {
    "grad_norm": lambda m: grad_norm(m.net, norm_type=2),
    "clip_grad_norm_": lambda m: float(nn.utils.clip_grad_norm_(m.net.parameters(), 0.05)),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.net.parameters(), 1e-3),
    "mul_": lambda m: [p.grad.mul_(0.5) for p in m.net.parameters() if p.grad is not None] and None,
    "shape": lambda m: [tuple(p.grad.shape) for p in m.net.parameters() if p.grad is not None],
    "none": lambda m: setattr(m.net[0].weight, "grad", None),
    "assigned": lambda m: [setattr(p, "grad", torch.ones_like(p) * 1e-3) for p in m.net.parameters()] and None,
    "one element": lambda m: m.net[0].weight.grad[0].zero_() is None,  # type: ignore[index]
    "nan check": lambda m: any(bool(torch.isnan(p.grad).any()) for p in m.net.parameters() if p.grad is not None),
    "safe_set_*": _change_gradients,
    "safe_get_full_grad": lambda m: [float(gradient(param).abs().sum()) for param in m.net.parameters()],
    "sum": lambda m: sum(float(p.grad.abs().sum()) for p in m.net.parameters() if p.grad is not None),
}


def _in_autocast(module: Touched) -> torch.Tensor:
    with autocast():
        return (module.net[3].weight @ module.net[3].weight.T).square().mean() * 0.1


TERMS: dict[str, Callable[[Touched], torch.Tensor]] = {
    "autocast": _in_autocast,
    "L2": lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()),
    "before, L2": lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()),
    "L1 of a vector": lambda m: 0.01 * nn.utils.parameters_to_vector(m.net.parameters()).abs().sum(),
    "distance": lambda m: 0.1 * sum(((p - mean) ** 2).sum() for mean, p in _pairs(m)),
    "zero": lambda m: 0.0 * sum(p.sum() for p in m.net.parameters()),
    "orthogonality": lambda m: 0.1 * ((m.net[3].weight @ m.net[3].weight.T - torch.eye(6)) ** 2).sum(),
    "views": lambda m: m.net[0].weight[2:5].T.exp().mean() + m.net[3].weight.view(-1)[::2].norm(),
    "a constant": lambda m: (m.net[3].weight * m.net[3].weight.detach()).sum() * 0.1,
    "a kept one": lambda m: (lambda p: p.square().sum() * p.norm() * 0.01)(next(iter(m.net.parameters()))),
    "before": lambda m: torch.zeros(()),
    "autograd.grad of all": lambda m: (
        0.01
        * sum(
            each.square().sum()
            for each in torch.autograd.grad(
                m.net(torch.ones(2, WIDTH)).square().mean(), list(m.net.parameters()), create_graph=True
            )
        )
    ),
    "autograd.grad": lambda m: (
        torch.autograd.grad(m.net[3].weight.square().sum(), m.net[3].weight, create_graph=True)[0].square().sum() * 0.01
    ),
}

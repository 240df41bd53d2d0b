"""A model whose weights are initialised in every way but in the constructor of the module that owns them."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WIDTH = 8


class Table(nn.Module):
    """A weight and a bias that are drawn in the constructor."""

    def __init__(self, rows: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH))
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def double_scale(module: nn.Module) -> None:
    """Double the module's ``scale``, which has no dimension."""
    if isinstance(module, Initialised):
        assert module.scale.shape == ()
        module.scale.data.mul_(2.0)


class Initialised(nn.Module):
    """Initialises its children, each in a way that works in plain torch, and uses them all."""

    PARTS = (
        "normal trunc xavier orthogonal data fill copy row view_held flat numpy replaced other set vector foreach "
        "loaded assigned cast scaled applied parameter by_metadata first second"
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Table() for name in self.PARTS.split()})
        self._initialise({name: part.weight for name, part in self.parts.items()})
        self.parts["copied"] = copy.deepcopy(self.parts["normal"])
        self.parts["second"].weight = self.parts["first"].weight
        # The encoder makes its layers by copying the one given.
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        nn.init.constant_(self.scale, 1.25)
        self.apply(double_scale)
        self.register_buffer("phases", torch.polar(torch.ones(WIDTH), torch.randn(WIDTH)))
        self.register_buffer("total", self.parts["fill"].weight.sum().detach())

    @torch.no_grad()
    def _initialise(self, weight: dict[str, nn.Parameter]) -> None:
        parts, square = self.parts, (WIDTH, WIDTH)
        nn.init.normal_(weight["normal"], std=0.3)
        nn.init.trunc_normal_(weight["trunc"], std=0.2)
        nn.init.xavier_uniform_(weight["xavier"])
        nn.init.orthogonal_(weight["orthogonal"])
        weight["data"].data.normal_(0.0, 0.4)
        weight["fill"].fill_(0.125)
        weight["copy"].copy_(torch.arange(WIDTH * WIDTH).view(square) / 64)
        weight["row"][0].zero_()
        weight["row"][1:3] = 0.5
        held = weight["view_held"].data[: WIDTH // 2]
        for name in ("normal", "trunc"):  # others are written while that view is held
            weight[name].mul_(1.5)
        held.fill_(0.75)
        weight["flat"].view(-1)[::2].mul_(2.0)
        weight["numpy"].detach().numpy()[2] = 3.0
        weight["replaced"].data = torch.full(square, 0.2)
        weight["other"].data = weight["normal"].data.clone() * 2
        weight["set"].set_(torch.full(square, 0.3))
        vector = parameters_to_vector(parts["vector"].parameters())
        vector_to_parameters(vector * 0.1, parts["vector"].parameters())
        torch._foreach_mul_([weight["foreach"], parts["foreach"].bias], 0.5)
        values = {"weight": torch.full(square, 0.4), "bias": torch.ones(WIDTH)}
        parts["loaded"].load_state_dict(values)
        parts["assigned"].load_state_dict(values, assign=True)
        parts["cast"].half().float()
        weight["scaled"] /= weight["scaled"].norm()
        weight["applied"].fill_(0.25)
        parts["applied"] = parts["applied"].apply(lambda module: module.weight.data.mul_(3.0))
        weight["applied"][0] += 1
        parts["parameter"].weight = nn.Parameter(weight["orthogonal"])
        for name, param in parts["by_metadata"].named_parameters():
            if param.dim() > 1 and param.numel() == WIDTH**2 and len(param) == param.size(0) == param.shape[1]:
                nn.init.constant_(param, 0.9)
            else:
                assert name == "bias" and param.ndim == 1
                param.data = param.data + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x) * self.scale
        for part in self.parts.values():
            x = functional.layer_norm(x + part(x), (WIDTH,))
        return x

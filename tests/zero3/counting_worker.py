"""Two ranks run collectives, and see them waited for and counted: ``python -m tests.zero3.counting_worker``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.zero3.ranks.locations import _counts, _kind_of

COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "gather": lambda one: dist.all_gather_into_tensor(one.new_empty(2), one, async_op=True).wait(),
    "reduction": dist.all_reduce,
    "broadcast": lambda one: dist.broadcast(one, 0),
    "barrier": lambda _: dist.barrier(),
}


def main() -> None:
    dist.init_process_group("gloo")
    dist.new_group()
    kinds: list[str] = []

    def wait(original: Callable[..., bool], work: dist.Work, *args: Any) -> bool:
        kinds.append(_kind_of(work))
        return original(work, *args)

    before = _counts()
    assert len(before) == 2
    with wrapped(dist.Work, "wait", wait):
        for run in COLLECTIVES.values():
            run(torch.ones(1))
    assert kinds == list(COLLECTIVES), kinds
    assert sum(_counts().values()) == sum(before.values()) + len(COLLECTIVES), (before, _counts())


if __name__ == "__main__":
    main()

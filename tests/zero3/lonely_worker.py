"""Rank 1 ends, and rank 0 asks for the error of a collective without it: ``python -m tests.zero3.lonely_worker``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from lightning_smartinfinity.zero3.ranks.watchdog import _is_of_collective


def _reduce_for_ever() -> None:
    while True:
        dist.all_reduce(torch.ones(1))


def main() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        _reduce_for_ever()
    assert _is_of_collective(caught.value), repr(caught.value)


if __name__ == "__main__":
    main()

"""The environment of a launcher for a script that was started without one."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from lightning_smartinfinity.integrations.transformers.launch import launched


def test_scripts_that_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None chooses a port before it opens it, which another script could open in between."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with launched():
        assert os.environ["MASTER_PORT"] == "0"
        stores = [next(dist.rendezvous("env://"))[0] for _ in range(2)]
        assert stores[0].port != stores[1].port
    assert "RANK" not in os.environ

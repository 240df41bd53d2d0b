"""``Trainer(strategy="smart_infinity")`` and ``Fabric`` work in new interpreters, whatever the order of imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fresh_python import fresh_python

IS_REGISTERED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from lightning.pytorch.strategies import StrategyRegistry
loaded = ["deepspeed" in sys.modules, "lightning_smartinfinity.integrations.trainer.strategy" in sys.modules]
print("smart_infinity" in StrategyRegistry, *loaded)
"""
REGISTERED_LAZILY = "True False False"


@pytest.mark.seam("discovery by name", "StrategyRegistry, STRATEGY_REGISTRY; the entry point torch.backends.")
def test_without_autoload_the_import_of_the_package_registers_the_name(tmp_path: Path) -> None:
    """Where torch may not load plugins, the name is unknown until the package is imported, even after Lightning."""
    code = "import lightning" + IS_REGISTERED + "import lightning_smartinfinity" + IS_REGISTERED
    printed = fresh_python(code, cwd=tmp_path, autoload=False).splitlines()
    assert printed == ["False False False", REGISTERED_LAZILY]


def test_training_by_name(tmp_path: Path) -> None:
    """A script that names the strategy alone trains with Fabric and twice with a Trainer, and leaves no state behind.

    Both registries know the name, without the strategy or DeepSpeed being loaded, also when Lightning is reloaded. A
    wrong key is refused before DeepSpeed is imported, which would choose an accelerator for good.
    """
    code = """
    import importlib, sys
    import torch
    import lightning.pytorch.strategies as strategies
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    before = strategies.StrategyRegistry
    print("known", "smart_infinity" in before, "smart_infinity" in STRATEGY_REGISTRY)
    importlib.reload(strategies)
    print("reloaded", strategies.StrategyRegistry is not before, "smart_infinity" in strategies.StrategyRegistry)
    doors = [f"lightning_smartinfinity.integrations.{door}.strategy" for door in ("trainer", "fabric")]
    names = ["deepspeed", *doors]
    print("loaded", *(name in sys.modules for name in names))

    from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
    try:
        SmartInfinityStrategy(zero={"offload_param": {"devise": "cpu"}})
    except ConfigError as error:
        print("refused", "deepspeed" in sys.modules, "SmartInfinityStrategy(zero=" in str(error))

    class Model(BoringModel):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    for _ in range(2):
        model = Model()
        before = model.layer.weight.detach().clone()
        trainer = Trainer(
            strategy="smart_infinity", accelerator="cpu", devices=1, max_steps=2, limit_val_batches=0,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(model)
        after = trainer.strategy.lightning_module_state_dict()["layer.weight"]
        print("steps", trainer.global_step, "moved", not torch.equal(before, after.float().cpu()))

    fabric = Fabric(strategy="smart_infinity", accelerator="cpu", devices=1, precision="bf16-mixed")
    print("chosen", type(fabric.strategy).__name__, type(fabric.strategy.precision).__name__)
    fabric.launch()
    net = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().mean()
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print("fabric moved", losses[0] != losses[1])
    """
    words = ("known", "reloaded", "loaded", "refused", "steps", "chosen", "fabric")
    printed = [line for line in fresh_python(code, cwd=tmp_path).splitlines() if line.split(" ")[0] in words]
    assert printed == [
        "known True True",
        "reloaded True True",
        "loaded False False False",
        "refused False True",
        *["steps 2 moved True"] * 2,
        "chosen SmartInfinityFabricStrategy SmartInfinityFabricPrecision",
        "fabric moved True",
    ]
    assert not list((tmp_path / "smart_infinity").glob("*/*"))

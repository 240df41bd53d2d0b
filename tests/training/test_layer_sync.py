"""``Trainer(sync_batchnorm=True)`` and layer plugins of the user's convert the module, as with Lightning's DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.integrations.trainer.callback_support import synchronize_layers
from tests.helpers.trainers import fit
from tests.training.small import Small

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Synchronized(nn.BatchNorm1d):
    """The class that the plugin below converts to."""


class Plugin(LayerSync):
    """Replaces batch norms by others with the same parameters."""

    def apply(self, model: nn.Module) -> nn.Module:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child) is nn.BatchNorm1d:
                    converted = Synchronized(child.num_features)
                    converted.weight, converted.bias = child.weight, child.bias
                    setattr(module, name, converted)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


class Normed(Small):
    """Trains a batch norm that configure_model builds."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_a_plugin_converts_what_configure_model_built(tmp_path: Path) -> None:
    """What it makes is trained with the parameters that ZeRO-3 has partitioned already."""
    module, plain = Normed(), Normed()
    fit(module, tmp_path, precision="32-true", plugins=[Plugin()], use_distributed_sampler=False)
    fit(plain, tmp_path, "auto", precision="32-true")
    assert type(module.net[1]) is Synchronized
    torch.testing.assert_close(module.net[1].running_mean, plain.net[1].running_mean)


@pytest.mark.parametrize(("device", "ranks", "kind"), [(GPU, 2, nn.SyncBatchNorm), (CPU, 1, nn.BatchNorm1d)])
def test_torch_synchronizes_batch_norms_of_several_processes(
    device: torch.device, ranks: int, kind: type[nn.Module]
) -> None:
    """The parameters stay; one process has nothing to synchronize."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    converted = synchronize_layers(model, TorchSyncBatchNorm(), device=device, ranks=ranks)
    assert type(converted[0]) is kind  # type: ignore[index]
    assert converted[0].weight is model[0].weight  # type: ignore[index]


def test_batch_norms_on_cpus_are_refused() -> None:
    """Torch's own error would come in the first step. A model without batch norms trains."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UnsupportedError, match="'1': torch's SyncBatchNorm needs a GPU") as caught:
        synchronize_layers(net, TorchSyncBatchNorm(), device=CPU, ranks=2)
    assert "sync_batchnorm" in caught.value.remedy
    assert synchronize_layers(net[:1], TorchSyncBatchNorm(), device=CPU, ranks=2)[0] is net[0]  # type: ignore[index]

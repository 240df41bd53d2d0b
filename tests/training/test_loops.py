"""Traffic of a step, and loaders of the user's around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.plain import Everything
from tests.helpers.trainers import quiet_trainer


@pytest.mark.parametrize(("precision", "read"), [("bf16-mixed", 12), ("32-true", 8)])
def test_sixteen_bit_steps_move_twelve_bytes_each_way(precision: Any, read: int, tmp_path: Path) -> None:
    """The kernel's counters and ours show 12 to 12.5 B read and written per parameter and step.

    In fp32 the partition is the master, so that a step reads 8 B.
    """
    strategy, marks = SmartInfinityStrategy(tmp_path / "storage", transfer=TransferConfig(direct_io="on")), []

    def mark(*_: Any) -> None:
        strategy.drain()
        lines = Path("/proc/self/io").read_text().splitlines()
        system = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        ours = strategy.traffic()
        marks.append(
            [system["read_bytes"], ours.shared_read_bytes, system["write_bytes"], ours.shared_write_bytes],
        )

    callback = LambdaCallback(on_train_start=mark, on_train_end=mark)
    module = LitTiny(Recipe(precision=precision, width=256, max_steps=4))
    quiet_trainer(tmp_path, strategy, precision=precision, max_steps=4, callbacks=[callback]).fit(module)
    updates = 4 * strategy.state_numel
    strategy.close()
    moved = [(last - first) / updates for first, last in zip(*marks, strict=True)]
    assert all(read <= figure < read + 0.5 for figure in moved[:2])
    assert all(12 <= figure < 12.5 for figure in moved[2:])


class Numbered(DataLoader[Any]):
    """A loader with a state of the user's own."""

    loaded: ClassVar[list[object]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)


def test_checkpoints_hold_the_states_of_the_users_loaders_alone(tmp_path: Path) -> None:
    """Positions of plain loaders are for training records: a checkpoint has what Lightning alone would have there."""

    class Two(Everything):
        saves = False

        def train_dataloader(self) -> Any:
            batches = list(super().train_dataloader())
            return CombinedLoader([DataLoader(batches, None), Numbered(batches, None)], "min_size")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1 and self.saves:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")
                state = self.trainer.fit_loop.state_dict()["state_dict"]["combined_loader"]
                assert [sorted(one)[-1] for one in state] == ["seed", "mine"]
            return super().training_step(batch[0], batch_idx)

    module, resumed = Two(), Two()
    module.saves = True
    quiet_trainer(tmp_path, max_steps=2, accumulate_grad_batches=1).fit(module)
    with pytest.warns(UserWarning, match="Lightning replays the epoch's batches from the first"):
        quiet_trainer(tmp_path, max_steps=3).fit(resumed, ckpt_path=tmp_path / "middle.ckpt")
    assert Numbered.loaded == [{"mine": 1}]

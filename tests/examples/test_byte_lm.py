from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

from tests.helpers.trainers import quiet_trainer

Example = Callable[[str], ModuleType]


@pytest.mark.parametrize(("size", "expected"), [("124m", 124e6), ("355m", 355e6), ("774m", 774e6), ("1.5b", 1558e6)])
def test_sizes_hold_what_their_names_say(example: Example, size: str, expected: float) -> None:
    """The sizes have GPT-2's parameter counts, within two percent."""
    with torch.device("meta"):
        model = example("byte_lm").ByteLM(size, block_size=1024)
        model.configure_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(expected, rel=0.02)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread, since more threads slow down models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_parts_of_the_model(example: Example) -> None:
    """Only matrices decay, a prediction does not depend on later bytes, and the rate falls to a tenth of its peak."""
    byte_lm = example("byte_lm")
    model = byte_lm.ByteLM("nano")
    model.configure_model()
    for name, parameter in model.named_parameters():
        embedding = name.startswith(("model.bytes", "model.positions"))
        assert byte_lm.is_matrix(name) == (parameter.dim() == 2 and not embedding), name
    decoder, tokens = byte_lm.Decoder(2, 32, 2, block_size=8), torch.randint(0, 256, (1, 8))
    changed = torch.cat([tokens[:, :5], torch.zeros(1, 3, dtype=tokens.dtype)], 1)
    assert torch.equal(decoder(tokens)[0, :5], decoder(changed)[0, :5])
    factors = [byte_lm.warmup_cosine(step, num_warmup=4, num_steps=12) for step in range(15)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, *sorted(factors[3:12], reverse=True), *[0.1] * 3])
    with pytest.raises(ValueError, match=r"'huge'.*nano, tiny"):
        byte_lm.ByteLM("huge")


def test_learns_and_generates(example: Example, tmp_path: Path) -> None:
    """In plain torch the model learns one sentence by heart; a new model begins with saved weights."""
    for index in range(40):
        (tmp_path / f"{index:02d}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    L.seed_everything(0, verbose=False)
    model = example("byte_lm").ByteLM("nano", block_size=32, lr=1e-2)
    settings: dict[str, Any] = {"max_epochs": -1, "max_steps": 120, "val_check_interval": 120}
    trainer = quiet_trainer(tmp_path, "auto", precision="32-true", use_distributed_sampler=False, **settings)
    trainer.fit(model, example("text_folder").TextFolder(str(tmp_path), "*.txt", block_size=32))
    assert float(trainer.callback_metrics["val_loss"]) < 0.3
    assert model.generate(b"the quick ", 15, temperature=0) == b"the quick brown fox jumps"
    assert model.generate(b"the", 20, seed=1) == model.generate(b"the", 20, seed=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
    new = example("byte_lm").ByteLM("nano", block_size=32, init_from=str(tmp_path / "saved.ckpt")).state_dict()
    assert all(torch.equal(new[name], weight) for name, weight in model.state_dict().items())

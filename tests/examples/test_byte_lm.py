from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch

Example = Callable[[str], ModuleType]


@pytest.mark.parametrize(("size", "expected"), [("124m", 124e6), ("355m", 355e6), ("774m", 774e6), ("1.5b", 1558e6)])
def test_sizes_hold_what_their_names_say(example: Example, size: str, expected: float) -> None:
    """The sizes have GPT-2's parameter counts, within two percent."""
    with torch.device("meta"):
        model = example("byte_lm").ByteLM(size, block_size=1024)
        model.configure_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_unknown_size(example: Example) -> None:
    """The error names the value and the choices."""
    with pytest.raises(ValueError, match=r"'huge'.*nano, tiny"):
        example("byte_lm").ByteLM("huge")


def test_only_matrices_decay(example: Example) -> None:
    """Names distinguish matrices from vectors and embeddings, since ZeRO-3 leaves no shapes."""
    byte_lm = example("byte_lm")
    model = byte_lm.ByteLM("nano")
    model.configure_model()
    for name, parameter in model.named_parameters():
        embedding = name.startswith(("model.bytes", "model.positions"))
        assert byte_lm.is_matrix(name) == (parameter.dim() == 2 and not embedding), name


def test_learning_rate(example: Example) -> None:
    """The rate rises linearly to its peak, then falls to a tenth and stays there."""
    factors = [example("byte_lm").warmup_cosine(step, num_warmup=4, num_steps=12) for step in range(15)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[8] == pytest.approx(0.55)
    assert factors[12:] == pytest.approx([0.1] * 3)


def test_no_look_ahead(example: Example) -> None:
    """A prediction does not depend on later bytes."""
    torch.manual_seed(0)
    model = example("byte_lm").Decoder(2, 32, 2, block_size=8)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = 0
    assert torch.equal(model(tokens)[0, :5], model(changed)[0, :5])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of 40 files that repeat one sentence."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02d}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    return folder


def test_learns_and_generates(example: Example, text: Path, tmp_path: Path) -> None:
    """In plain torch the model learns one sentence by heart."""
    L.seed_everything(0, verbose=False)
    model = example("byte_lm").ByteLM("nano", block_size=32, lr=1e-2)
    trainer = fit(model, example("text_folder").TextFolder(str(text), "*.txt", block_size=32), tmp_path, max_steps=120)
    assert float(trainer.callback_metrics["val_loss"]) < 0.3
    assert model.generate(b"the quick ", 15, temperature=0) == b"the quick brown fox jumps"
    assert model.generate(b"the", 20, seed=1) == model.generate(b"the", 20, seed=1)


def test_initial_weights_from_a_checkpoint(example: Example, text: Path, tmp_path: Path) -> None:
    """A new model begins with the saved weights."""
    byte_lm = example("byte_lm")
    model = byte_lm.ByteLM("nano", block_size=32)
    trainer = fit(model, example("text_folder").TextFolder(str(text), "*.txt", block_size=32), tmp_path, max_steps=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
    new = byte_lm.ByteLM("nano", block_size=32, init_from=str(tmp_path / "saved.ckpt"))
    for name, weight in model.state_dict().items():
        assert torch.equal(new.state_dict()[name], weight), name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread, since more threads slow down models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fit(model: Any, data: Any, folder: Path, *, max_steps: int) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=max_steps,
        max_epochs=-1,
        val_check_interval=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data)
    return trainer

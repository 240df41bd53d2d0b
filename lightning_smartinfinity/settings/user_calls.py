"""The calls that errors and warnings advise, as users of each entry point write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CALLS_OF_FABRIC", "CALLS_OF_TRAINER", "CALLS_OF_TRANSFORMERS", "UserCalls", "advise", "user_calls"]


@dataclass(frozen=True)
class UserCalls:
    """The calls of one entry point.

    Args:
        from_storage: Call or argument that resumes a training from storage.
        from_checkpoint: The same for a checkpoint, with ``{path!r}`` for its path.
        begins_anew: Half a sentence that says how to begin a new training instead.
        resumes: Half a sentence that says how to go on after an interruption.
        changes: Half a sentence that says how to resume with new hyperparameters.
        saves: Calls that save a model after a training that was complete.
    """

    from_storage: str
    from_checkpoint: str
    begins_anew: str
    resumes: str
    changes: str
    saves: str = ""

    @property
    def begin_anew(self) -> str:
        """The remedy where a training cannot be resumed from storage."""
        return f"Begin anew, without resuming from storage ({self.begins_anew}), or pass a checkpoint."

    def describe_kept(self, changes: Sequence[tuple[str, str]], *, setter: str = "", saved: str = "has") -> str:
        """Return the warning that a resumed training keeps values that the script sets otherwise.

        Args:
            changes: Each value that differs, as text of the script's own and of the saved value.
            setter: The object in which the script sets them, with a preposition.
            saved: Verb between the training and its values.
        """
        now, before = (", ".join(dict.fromkeys(column)) for column in zip(*changes, strict=True))
        return (
            f"The script sets {now}{setter}, but the training that it resumes {saved} {before}, and keeps that. "
            f"To train on with the new value{'s' if changes[1:] else ''}, {self.changes}."
        )


CALLS_OF_TRAINER = UserCalls(
    from_storage="ckpt_path='storage'",
    from_checkpoint="ckpt_path={path!r}",
    begins_anew="leave ckpt_path out",
    resumes="start the script again with trainer.fit(..., ckpt_path='storage')",
    changes="call strategy.use_new_hyperparameters() before trainer.fit",
    saves="trainer.save_checkpoint(path) or strategy.save_pretrained(folder)",
)
CALLS_OF_FABRIC = UserCalls(
    from_storage="fabric.strategy.resume()",
    from_checkpoint="fabric.load({path!r}, state)",
    begins_anew="leave fabric.strategy.resume() out",
    resumes="start the script again with fabric.strategy.resume() before fabric.setup",
    changes="call fabric.strategy.use_new_hyperparameters() before fabric.setup",
)
CALLS_OF_TRANSFORMERS = UserCalls(
    from_storage="resume_from_checkpoint='storage'",
    from_checkpoint="resume_from_checkpoint={path!r}",
    begins_anew="leave resume_from_checkpoint out",
    resumes="start the script again with trainer.train(resume_from_checkpoint='storage')",
    changes="call training.use_new_hyperparameters() before trainer.train",
    saves="trainer.save_model(folder)",
)

_ADVISED = CALLS_OF_TRAINER


def user_calls() -> UserCalls:
    """Return the calls of the entry point that this process uses; those of Lightning's Trainer if it uses none."""
    return _ADVISED


def advise(calls: UserCalls) -> None:
    """Make errors and warnings of this process name these calls from now on."""
    global _ADVISED
    _ADVISED = calls

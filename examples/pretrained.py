"""Loads tokenizers of transformers, and says in a line what is wrong where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model.

    Args:
        model: Folder of the model, or its name on the hub.

    Raises:
        ValueError: There is no such model, or it has no tokenizer that transformers can load.
    """
    is_folder = Path(model).is_dir()
    if not is_folder:
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ValueError(f"There is no folder {model}.")
        # Without a network this takes a minute.
        print(f"{model} is no folder: looking for it in the hub's cache and on the hub ...", file=sys.stderr)
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        if is_folder:
            raise ValueError(f"The folder {model} has no tokenizer that transformers can load: {reason}") from None
        raise ValueError(f"There is no folder {model}, and the hub gives no model of this name: {reason}") from None

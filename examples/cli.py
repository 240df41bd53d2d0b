"""Runs a training that a file describes, through LightningCLI.

    python examples/cli.py fit --config examples/finetune_text.yaml
    python examples/cli.py fit --config examples/finetune_text.yaml --model.model_size small

The strategy is found by its name: nothing here imports the package.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from lightning.pytorch.cli import LightningCLI


def main(arguments: list[str] | None = None) -> None:
    """Run the subcommand that the arguments name."""
    if find_spec("jsonargparse") is None:
        sys.exit("cli: LightningCLI needs jsonargparse. In the checkout: pip install '.[cli]'")
    LightningCLI(seed_everything_default=0, save_config_kwargs={"overwrite": True}, args=arguments)


if __name__ == "__main__":
    main()

"""Runs a training that a file describes, through LightningCLI.

    python examples/cli.py fit --config examples/finetune_text.yaml
    python examples/cli.py fit --config examples/finetune_text.yaml --model.model_size small

The strategy is found by its name: nothing here imports the package.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI


def main(arguments: list[str] | None = None) -> None:
    """Run the subcommand that the arguments name."""
    LightningCLI(seed_everything_default=0, save_config_kwargs={"overwrite": True}, args=arguments)


if __name__ == "__main__":
    main()

"""The same training through LightningCLI: everything comes from a configuration file or the command line.

    python examples/finetune_text_cli.py fit --config examples/finetune_text.yaml
    python examples/finetune_text_cli.py fit --config examples/finetune_text.yaml --model.model_size small

The strategy is found by its name: nothing here imports the package.
"""

from __future__ import annotations

from byte_lm import ByteLM
from lightning.pytorch.cli import LightningCLI
from text_folder import TextFolder


def main(arguments: list[str] | None = None) -> None:
    """Run the subcommand that the arguments name."""
    LightningCLI(ByteLM, TextFolder, seed_everything_default=0, save_config_kwargs={"overwrite": True}, args=arguments)


if __name__ == "__main__":
    main()

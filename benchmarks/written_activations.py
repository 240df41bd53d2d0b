"""Measures how many bytes of what models of transformers save for backward are written, beside all of them.

    python benchmarks/written_activations.py --storage /mnt/nvme0

The models are small, and have random weights and no dropout. Parameters and the batch are left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from comparison import Figures, parse_options, show
from machine import describe
from saving_systems import Meter
from torch import nn

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.packing import tensors_in

COLUMNS = {"saved MB": ("saved", 2), "written MB": ("written", 2), "written / saved": ("ratio", 3)}


def small_models() -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build models of transformers with random weights and without dropout."""
    import transformers as hf

    common = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"vocab_size": 1000, "n_embd": 256, "n_layer": 3, "n_head": 4}
    t5 = {"vocab_size": 1000, "d_model": 256, "d_ff": 1024, "d_kv": 64, "num_layers": 3, "num_heads": 4}
    return {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_hidden_layers=3, intermediate_size=688)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, dropout_rate=0.0, decoder_start_token_id=0)),
        "BERT": lambda: hf.BertForMaskedLM(
            hf.BertConfig(**common, **dropout, num_hidden_layers=3, intermediate_size=1024)
        ),
        "GPT-2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(**gpt2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))
        ),
    }


def compare(options: argparse.Namespace) -> dict[str, Figures]:
    """Return what is written of each model beside what it saves, tensor by tensor."""
    rows = {}
    for name, build in small_models().items():
        torch.manual_seed(0)
        model = build().train()
        batch = torch.randint(0, 1000, (4, 128))
        meter = Meter([*model.parameters(), *model.buffers(), *tensors_in(batch)])
        with meter.forward():
            model(input_ids=batch, labels=batch).loss.backward()
        with tempfile.TemporaryDirectory(dir=options.storage) as folder:
            settings = ActivationOffload(keep=0, min_bytes=1, host_bytes="1GiB")
            activations = OffloadedActivations([folder], module=model, settings=settings)
            with activations.forward(batch):
                loss = model(input_ids=batch, labels=batch).loss
            while activations.traffic().written_bytes < activations.traffic().offloaded_bytes:
                time.sleep(0.01)
            written = activations.traffic().written_bytes
            loss.backward()
            activations.close()
        rows[name] = {"saved": meter.saved_bytes / 1e6, "written": written / 1e6, "ratio": written / meter.saved_bytes}
    return rows


def main() -> int:
    """Print a table below the machine.

    Returns:
        Exit status: 0.
    """
    options = parse_options(__doc__, size=None, tokens=None, child=None, steps=None)
    machine = describe("torch", "transformers")
    print(machine, flush=True)
    rows = compare(options)
    show(rows, COLUMNS, heading="bytes of models of transformers, without dropout", path=options.json, machine=machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())

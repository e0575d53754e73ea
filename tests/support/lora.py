"""Tiny LoRA adapters for the tiny model, as files an engine loads (safetensors and its configuration)."""

import json
import random
import struct
from pathlib import Path

from extproc.prompt.tiny import tiny_model_path

RANK = 8


def write_lora(folder: Path, seed: int) -> Path:
    """An adapter of the attention's query and value projections with random weights."""
    model = json.loads((tiny_model_path() / "config.json").read_text())
    hidden, layers, width = model["hidden_size"], model["num_hidden_layers"], model["head_dim"]
    outputs = {
        "q_proj": model["num_attention_heads"] * width,
        "v_proj": model["num_key_value_heads"] * width,
    }
    shapes = {}
    for layer in range(layers):
        for module, size in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes[f"{name}.lora_A.weight"] = [RANK, hidden]
            shapes[f"{name}.lora_B.weight"] = [size, RANK]
    rng = random.Random(seed)
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (rows, columns) in shapes.items():
        weights = struct.pack(f"<{rows * columns}f", *(rng.gauss(0.0, 0.1) for _ in range(rows * columns)))
        header[name] = {
            "dtype": "F32",
            "shape": [rows, columns],
            "data_offsets": [len(data), len(data) + len(weights)],
        }
        data += weights
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
        "base_model_name_or_path": "tiny",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder

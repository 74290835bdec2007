"""Write a tiny model folder and a recipe for it without torch: a tokenizer of single characters, random weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from pipeline.models.tensors import tensors


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 40, "tie_word_embeddings": False}
    config = {"model_type": "llama", **heads, **sizes, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    letters = {letter: i for i, letter in enumerate("?abcdefghijklmnopqrstuvwxyz 0123456789+=")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_weights(folder: Path) -> None:
    """Write all weights of the model in a folder's config.json to one file; those of a sequence classifier with its score."""
    config = json.loads((folder / "config.json").read_text())
    weights = {tensor.name: np.full(tensor.shape, 0.5, np.float32) for tensor in tensors(config)}
    if any(kind.endswith("ForSequenceClassification") for kind in config.get("architectures", ())):
        weights.pop("lm_head.weight", None)
        weights["score.weight"] = np.full((1, config["hidden_size"]), 0.5, np.float32)
    save_file(weights, folder / "model.safetensors")


def write_data(path: Path, inputs: list[str]) -> Path:
    path.write_text("".join(json.dumps({"input": text, "output": "1"}) + "\n" for text in inputs))
    return path


def write_recipe(folder: Path, name: str = "tiny", **top: Any) -> Path:
    """Write a GRPO recipe to folder/name.yaml that passes every check, on the local executor; `top` replaces top-level keys."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_data(folder / "data.jsonl", ["1+1=", "2+2="])
    recipe = {
        "algorithm": "grpo",
        "run_dir": str(folder / "run"),
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 3},
        "policy": {
            "model_name": str(folder / "model"),
            "random_init": True,
            "train_global_batch_size": 4,
            "max_total_sequence_length": 32,
        },
        "data": {"apply_chat_template": False, "train": {"data_path": str(folder / "data.jsonl"), "env_name": "math"}},
        "env": {"math": {"kind": "math"}},
        "cluster": {"executor": "local"},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**recipe, **top}))
    return path

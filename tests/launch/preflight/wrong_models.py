"""Ways to make a model folder wrong, one at a time."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.launch.model import write_model, write_weights

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}+{% endfor %}{% if add_generation_prompt %}={% endif %}"

Spoil = Callable[[Path], None]


def write_right_model(folder: Path) -> None:
    """Write a complete folder: two shards, their index, a tokenizer with a template, and generation_config.json."""
    write_model(folder)
    write_weights(folder)
    weights = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {name: SHARDS[name == HEAD] for name in weights}
    for shard in SHARDS:
        save_file({name: weights[name] for name, file in weight_map.items() if file == shard}, folder / shard)
    write(folder / INDEX, {"metadata": {"total_size": 0}, "weight_map": weight_map})
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "+", "unk_token": "?"})
    write(folder / "generation_config.json", {"eos_token_id": 38})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    change("architectures", ["LlamaForCausalLM"])(folder)
    change("eos_token_id", 38)(folder)


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# ---- config.json


def change(name: str, value: Any, file: str = "config.json") -> Spoil:
    return lambda folder: write(folder / file, {**read(folder / file), name: value})


def drop(name: str, file: str = "config.json") -> Spoil:
    return lambda folder: write(folder / file, {key: value for key, value in read(folder / file).items() if key != name})


def text(file: str, content: str) -> Spoil:
    return lambda folder: void((folder / file).write_text(content))


def void(result: object) -> None:
    """Drop a result."""


def with_bom(file: str) -> Spoil:
    return lambda folder: void((folder / file).write_bytes(b"\xef\xbb\xbf" + (folder / file).read_bytes()))


# ---- files


def pipe(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    return spoil


def loop(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(file)

    return spoil


def directory(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return spoil


def empty(file: str) -> Spoil:
    return text(file, "")


def remove(*files: str) -> Spoil:
    def spoil(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return spoil


def adapters_alone(folder: Path) -> None:
    for file in ("config.json", INDEX, *SHARDS):
        (folder / file).unlink()
    write(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "x", "r": 8})
    save_file({"base_model.model.lora_A.weight": np.zeros((8, 16), np.float32)}, folder / "adapter_model.safetensors")


def adapters_beside(folder: Path) -> None:
    write(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "x", "r": 8})


def both_ropes(folder: Path) -> None:
    change("rope_scaling", {"rope_type": "linear", "factor": 2.0})(folder)
    change("rope_parameters", {"rope_type": "linear", "factor": 4.0})(folder)


def without_head(folder: Path) -> None:
    """Leave the output layer out of the files and of the index."""
    (folder / SHARDS[1]).unlink()
    mapped(lambda weight_map: {name: file for name, file in weight_map.items() if name != HEAD})(folder)


def with_stray_tensor(folder: Path) -> None:
    stored(SHARDS[1], lambda weights: {**weights, "other": weights[HEAD]})(folder)
    mapped(lambda weight_map: {**weight_map, "other": SHARDS[1]})(folder)


def without_eos(folder: Path) -> None:
    """Leave no file that names a stop token."""
    drop("eos_token_id")(folder)
    remove("generation_config.json")(folder)
    drop("eos_token", "tokenizer_config.json")(folder)


def pickles_alone(folder: Path) -> None:
    remove(INDEX, *SHARDS)(folder)
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4")


# ---- weights


def mapped(edit: Callable[[dict[str, str]], dict[str, Any]]) -> Spoil:
    return lambda folder: write(folder / INDEX, {"weight_map": edit(read(folder / INDEX)["weight_map"])})


def stored(shard: str, edit: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Spoil:
    return lambda folder: save_file(edit(load_file(folder / shard)), folder / shard)


def header(shard: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = (folder / shard).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        text = json.dumps(edit(json.loads(content[8 : 8 + length]))).encode()
        (folder / shard).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return spoil


def first_entry(entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**entries, HEAD: {**entries[HEAD], **changes}}


def twice_in_header(folder: Path) -> None:
    content = (folder / SHARDS[1]).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    entry = json.dumps(json.loads(content[8 : 8 + length])[HEAD])
    text = f'{{"{HEAD}": {entry}, "{HEAD}": {entry}}}'.encode()
    (folder / SHARDS[1]).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def cut(file: str, nbytes: int = 5) -> Spoil:
    return lambda folder: void((folder / file).write_bytes((folder / file).read_bytes()[:-nbytes]))


def lengthen(file: str) -> Spoil:
    return lambda folder: void((folder / file).write_bytes((folder / file).read_bytes() + b"12345"))


def whole_beside(folder: Path) -> None:
    """Write model.safetensors beside the shards."""
    save_file({name: value for shard in SHARDS for name, value in load_file(folder / shard).items()}, folder / SINGLE)


def tied_but_different(folder: Path) -> None:
    change("tie_word_embeddings", True)(folder)
    stored(SHARDS[1], lambda weights: {HEAD: weights[HEAD] + 1})(folder)


def quantized(folder: Path) -> None:
    change("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 128})(folder)


# ---- tokenizer


def tokenizer(edit: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        content = read(folder / "tokenizer.json")
        edit(content)
        write(folder / "tokenizer.json", content)

    return spoil


def added(id: int, content: str, **more: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False) | {"normalized": False, "special": True}
    return {"id": id, "content": content, **flags, **more}


def template(content: str) -> Spoil:
    return text("chat_template.jinja", content)

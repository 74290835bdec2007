"""Folders of SmolLM2-135M-Instruct, whose real weights HETSTEP_SMOLLM2 names, with other tokenizers and configs."""

import json
import os
import shutil
from pathlib import Path

import pytest

SMOLLM2 = os.environ.get("HETSTEP_SMOLLM2", "")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="HETSTEP_SMOLLM2 does not name SmolLM2's folder")


def published(folder: Path) -> Path:
    """Return a copy of the model whose weights are a link."""
    folder.mkdir()
    for path in Path(SMOLLM2).iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, folder)
    return folder


def edited(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def eos_in_the_config_alone(folder: Path) -> Path:
    """Return the model with another eos token in its tokenizer, and the right one in config.json alone."""
    published(folder)
    (folder / "generation_config.json").unlink()
    edited(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edited(folder / "config.json", eos_token_id=[0, 2])
    return folder


def base_tokenizer(folder: Path) -> Path:
    """Return the model with a base model's tokenizer: no chat template, and no end of a turn in any file."""
    published(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    edited(folder / "tokenizer_config.json", eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>")
    edited(folder / "config.json", eos_token_id=0)
    return folder

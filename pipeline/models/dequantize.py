"""Dequantize a GGUF file to a Hugging Face checkpoint: python -m pipeline.models.dequantize FILE FOLDER.

transformers reads the configuration, the tokenizer, the chat template and the weights. It (5.19) gives every file with the
tokenizer of GPT-2 the pre-tokenizer of GPT-2. SmolLM's splits digits too, which is added here (llama.cpp, src/llama-vocab.cpp).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf.reader import read_gguf_metadata

SINGLE_DIGITS = ("smollm",)
"""Pre-tokenizers of llama.cpp that split digits one by one before GPT-2's splits the text."""


def convert(path: Path, folder: Path) -> None:
    """Write the model, the tokenizer and the chat template of a GGUF file as a Hugging Face checkpoint in bfloat16."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if read_gguf_metadata(str(path))[0].get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        fast = tokenizer.backend_tokenizer
        fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), fast.pre_tokenizer])
    options: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

"""Tiny multimodal checkpoints, each beside a checkpoint of its language model alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)

from pipeline.models.hugging_face import auto_model, language_model

PICTURES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


def config(text: PreTrainedConfig) -> PreTrainedConfig:
    described, own = text.to_dict(), {"tie_word_embeddings": text.tie_word_embeddings}
    match text.model_type:
        case "gemma4_text":
            heads = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32, "pooling_kernel_size": 1}
            return Gemma4Config(text_config=described, vision_config={**PICTURES, **heads})
        case "gemma3_text":
            pictures = {"model_type": "siglip_vision_model", **PICTURES, "image_size": 8, "vision_use_head": False}
            return Gemma3Config(text_config=described, vision_config=pictures, mm_tokens_per_image=1)
        case "qwen3_5_text" | "qwen3_5_moe_text":
            seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": text.hidden_size}
            made = Qwen3_5MoeConfig if "moe" in text.model_type else Qwen3_5Config
            return made(text_config=described, vision_config=seen, **own)
        case _:
            pictures = {"model_type": "pixtral", **PICTURES, "image_size": 8}
            return Mistral3Config(text_config=described, vision_config=pictures, **own)


def write(text: Path, both: Path) -> dict[str, torch.Tensor]:
    """Write a multimodal checkpoint to `both`, with the language model of `text`, and return it under the names of exports.

    Qwen's has the experts of a layer in one tensor and a layer for multi-token prediction, as published. Gemma's is as
    transformers saves a new model, without a prefix of the tensors for pictures that is in published checkpoints.
    """
    model = AutoModelForCausalLM.from_pretrained(text)
    torch.manual_seed(4)
    of = config(model.config)
    whole = auto_model("logprobs", of).from_config(of, dtype=torch.float32)
    language_model(whole).load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(both)
    saved = load_file(both / "model.safetensors")
    if "moe" in of.model_type:
        save_file({**whole.state_dict(), "mtp.norm.weight": torch.ones(3)}, both / "model.safetensors", {"format": "pt"})
    if of.model_type == "gemma3":
        return {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in saved.items()}
    return saved


def of_pictures(names: Iterable[str]) -> set[str]:
    """Return the names of the tensors that text does not use."""
    return {name for name in names if any(part in name for part in ("vision", "visual", "projector", "audio"))}


def in_text(name: str) -> str:
    """Return the name of a language model's tensor in a checkpoint of text alone."""
    return (
        name.replace("language_model.model.", "model.")
        .replace("model.language_model.", "model.")
        .removeprefix("language_model.")
    )

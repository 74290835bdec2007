"""The model families that Megatron-Core trains: see `base` for what a family says of itself."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from pipeline.models import deepseek, llama, moe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_moe": moe,
    "mixtral": moe,
    "deepseek_v3": deepseek,
}


def family(config: PreTrainedConfig) -> ModuleType:
    """The module of this package that describes the model, by its `model_type`."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"policy.model_name: Megatron-Core models of type '{config.model_type}' are not described; "
            f"known are {', '.join(FAMILIES)}; policy.dtensor_cfg trains others"
        )
    return FAMILIES[config.model_type]

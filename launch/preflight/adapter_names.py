"""Check the choice of FSDP2's adapted layers against a model's config.json, as the backend does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import LoRAConfig, Problem, RecipeError


def problems(config: LoRAConfig, model: Mapping[str, Any], served: bool = False) -> Iterator[Problem]:
    """Yield a problem for each name in the recipe that no adaptable layer has, and for adapters that engines cannot serve.

    served: whether refits send only the adapters to the engines. Imports torch and transformers if there are adapters.
    """
    if not config.enabled:
        return
    from pipeline.models import hugging_face  # imports torch and transformers, which submission may lack
    from pipeline.train import lora

    hf = hugging_face.meta_model(hugging_face.config_of(model))
    try:
        adapters = lora.inject(hf, config, hugging_face.layout(hf))
    except RecipeError as error:
        yield from error.problems
        return
    if served:
        yield from lora.not_served(adapters)

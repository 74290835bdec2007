"""Describe a policy's adapters for the engines that serve them, without building a train backend."""

from __future__ import annotations

from pipeline.config import PolicyConfig, refuse, uses_megatron
from pipeline.models.hugging_face import layout, meta_model, model_config
from pipeline.models.text_model import TextModel
from pipeline.train import lora
from pipeline.train.adapters import modules
from pipeline.train.adapters.adapted_layers import family_not_served
from pipeline.train.adapters.modules import not_served_modules, options
from pipeline.train.adapters.spec import AdapterSpec
from pipeline.types import ServedAdapters


def served_adapters(policy: PolicyConfig) -> ServedAdapters:
    """Return the description of the adapters of policy.model_name, in the order of the train backend.

    Raises RecipeError if a layer that the recipe names cannot have an adapter, or if engines cannot apply the adapters.
    """
    config = model_config(policy)
    refuse(family_not_served(config.model_type))
    if uses_megatron(policy):
        return _of_megatron(policy)
    hf = meta_model(config)
    adapters = lora.inject(hf, policy.dtensor_cfg.lora_cfg, layout(hf))
    refuse(lora.not_served(adapters))
    return ServedAdapters(adapters.spec.dim, adapters.spec.alpha, adapters.spec.rslora, adapters.shapes)


def _of_megatron(policy: PolicyConfig) -> ServedAdapters:
    model, peft = TextModel(model_config(policy)), policy.megatron_cfg.peft
    chosen = modules.choose(peft, model.parameters)
    refuse(not_served_modules(chosen))
    spec, tensors = AdapterSpec.of(options(peft)), {}
    for module in chosen:
        tensors |= module.tensors(spec, model.shapes)
    return ServedAdapters(spec.dim, spec.alpha, spec.rslora, tensors)

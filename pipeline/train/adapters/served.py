"""The adapters of a policy as engines that serve them need them, without a backend."""

from __future__ import annotations

from pipeline.config import PolicyConfig, refuse
from pipeline.models.hugging_face import layout, meta_model, model_config
from pipeline.train import lora
from pipeline.train.adapters.described import not_served
from pipeline.train.adapters.held import ExpertsAdapter
from pipeline.types import ServedAdapters


def served_adapters(policy: PolicyConfig) -> ServedAdapters:
    """Return the adapters of policy.model_name. Raises RecipeError for layers that cannot have one, and for experts."""
    hf = meta_model(model_config(policy))
    adapters = lora.inject(hf, policy.dtensor_cfg.lora_cfg, layout(hf))
    refuse(map(not_served, [one.weight for one in adapters.items if isinstance(one, ExpertsAdapter)][:1]))
    return ServedAdapters(adapters.spec.dim, adapters.spec.alpha, adapters.spec.rslora, adapters.shapes)

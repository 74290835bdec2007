"""Check `freeze_parameters` against the tensors that a model's config.json describes. Other families are checked at load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import PolicyConfig, Problem, uses_megatron
from pipeline.models import frozen_names
from pipeline.models.config_json import parse_config
from pipeline.models.sizes import MODEL_TYPES


def problems(section: str, policy: PolicyConfig, model: Mapping[str, Any], values: bool) -> Iterator[Problem]:
    """Yield the problems of the patterns in `freeze_parameters` of a recipe's section.

    model: the model's config.json. values: whether the model has a value head.
    """
    if not policy.freeze_parameters or model.get("model_type") not in MODEL_TYPES:
        return
    groups = frozen_names.known_groups(model, parse_config(model), uses_megatron(policy), values)
    names = [name for sources in groups.values() for name in sources]
    yield from frozen_names.problems(policy.freeze_parameters, names, groups, f"{section}.freeze_parameters")

"""Check `freeze_parameters` against the parameters that the train backend keeps of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import PolicyConfig, Problem, uses_megatron
from pipeline.models import frozen_names


def problems(section: str, policy: PolicyConfig, model: Mapping[str, Any], values: bool) -> Iterator[Problem]:
    """Yield the problems of the patterns in `freeze_parameters` of a recipe's section.

    model: the model's config.json. values: whether the model has a value head. Imports torch and transformers if there are
    patterns.
    """
    if not policy.freeze_parameters:
        return
    groups = frozen_names.known_groups(model, uses_megatron(policy), values)
    names = [name for sources in groups.values() for name in sources]
    yield from frozen_names.problems(policy.freeze_parameters, names, groups, f"{section}.freeze_parameters")

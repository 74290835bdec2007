"""Freeze the parameters that `freeze_parameters` names: they get no gradient, no optimizer state and no weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Problem, RecipeError, refuse
from pipeline.models.frozen_names import KEY, matched, problems


def freeze(
    patterns: Sequence[str],
    parameters: Iterable[tuple[torch.nn.Parameter, Sequence[str]]],
    groups: Mapping[str, Sequence[str]],
) -> list[torch.nn.Parameter]:
    """Freeze the parameters of this rank that `patterns` match, and return them.

    parameters: (parameter, names of its tensors on disk) of this rank. groups: {name: names of tensors on disk} of all
    parameters that train on any rank. Raises RecipeError if a pattern matches nothing, if only a part of a parameter is frozen,
    or if nothing is left to train.
    """
    if not patterns:
        return []
    names = {name for sources in groups.values() for name in sources}
    refuse(problems(patterns, names, groups))
    chosen = matched(patterns, names)
    frozen = [parameter for parameter, sources in parameters if sources and chosen.issuperset(sources)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen


def check_record(folder: Path, record: Mapping[str, Any], patterns: Sequence[str]) -> None:
    """Raise RecipeError if the checkpoint in `folder`, with this record, was saved with other frozen parameters."""
    if (theirs := record.get("frozen", [])) != list(patterns):
        message = (
            f"got {list(patterns)}, but {folder} was saved with {theirs}: its optimizer state is of other parameters. Try"
            " another run_dir that starts from its weights (python launch/export.py)"
        )
        raise RecipeError(Problem(KEY, "contradiction", message))

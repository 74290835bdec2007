"""Choose and freeze the tensors that do not train: those whose names on disk match a pattern of `freeze_parameters`.

They get no gradient, no optimizer state and no weight decay.

A parameter in a backend's memory may consist of several tensors on disk (Megatron-Core's linear_qkv, the experts of a layer in
transformers). It trains as a whole, so patterns must match all of its tensors or none. All experts of a layer count as one
parameter with both backends.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.models.family import CONSTANTS
from pipeline.recipe.problems import Problem, refuse

if TYPE_CHECKING:
    import torch

KEY = "policy.freeze_parameters"


def matched(patterns: Sequence[str], names: Iterable[str]) -> set[str]:
    """Return the names that at least one pattern matches. `*` matches any text, `[0-7]` one of these characters."""
    if not patterns:
        return set()
    match = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
    return {name for name in names if match(name)}


def problems(
    patterns: Sequence[str], names: Collection[str], groups: Mapping[str, Sequence[str]], key: str = KEY
) -> Iterator[Problem]:
    """Yield a problem for each pattern that matches nothing, for a parameter that is frozen in part, and if nothing trains.

    names: the names of all tensors on disk that train without patterns. groups: {parameter in memory: its tensors on disk}.
    """
    for pattern in patterns:
        if not matched([pattern], names):
            some = ", ".join(sorted(names)[:3])
            message = f"got '{pattern}', which matches none of the model's {len(names)} tensors; expected names such as {some}"
            yield Problem(key, "not-a-choice", message)
    frozen = matched(patterns, names)
    if frozen and len(frozen) == len(names):
        yield Problem(key, "contradiction", "got patterns that match all tensors; expected at least one tensor to train")
    for parameter, sources in groups.items():
        inside = [name for name in sources if name in frozen]
        if inside and len(inside) < len(sources):
            other = next(name for name in sources if name not in frozen)
            message = (
                f"got patterns that match {inside[0]} but not {other}; expected both or neither, since both are in the"
                f" parameter {parameter}"
            )
            yield Problem(key, "contradiction", message)
            return  # other layers have the same


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


def grouped(parameters: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Return {parameter: its tensors on disk}, in which all experts of a layer are one parameter."""
    groups: dict[str, list[str]] = {}
    for name, sources in parameters.items():
        groups.setdefault(re.sub(r"\.local_experts\.\d+\.", ".", name), []).extend(sources)
    return groups


def known_groups(config: Mapping[str, Any], megatron: bool, values: bool) -> dict[str, list[str]]:
    """Return {parameter in a backend's memory: its tensors on disk}, without buffers, from config.json.

    megatron: whether Megatron-Core trains. values: whether a value head replaces the output layer. Imports torch and
    transformers. Raises RecipeError for a model that transformers or the backend does not have.
    """
    from pipeline.models import hugging_face  # imports torch and transformers, which submission may lack
    from pipeline.models.text_model import TextModel

    of = hugging_face.config_of(config, whole=True)
    if megatron:
        parameters = TextModel(of, "values" if values else "logprobs").parameters
        return grouped({name: p.sources for name, p in parameters.items() if not name.endswith(CONSTANTS)})
    if values:
        of.num_labels = 1
    model = hugging_face.meta_model(of, "values" if values else "logprobs")
    trained = {name for name, _ in model.named_parameters()}.difference(hugging_face.other_modalities(model))
    pieces = hugging_face.layout(model)
    return {name: [piece.name for piece in of_name] for name, of_name in pieces.items() if name in trained}

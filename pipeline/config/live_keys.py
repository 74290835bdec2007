"""Find the live keys, whose values may change between two steps of a run, and check such changes.

A live key is a field of the schema that is marked `Live`. The part of the run that uses it reads it again in each step, or is
notified. `steered` checks the whole recipe with the changes, as a submission does. launch/steer.py asks for changes, and
pipeline/steering/live_changes.py applies them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pipeline.algorithms import build
from pipeline.config import config_tree, interpolation, loading, schema_validation, unused_keys
from pipeline.config.config_tree import ConfigMapping, ConfigNode
from pipeline.config.schema import Recipe, recipe_class, section
from pipeline.recipe.problems import Problem, RecipeError, refuse
from pipeline.recipe.values import Live

ANY = "*"
"""Stands in a key for a name that the recipe gives."""


@dataclass(frozen=True)
class Change:
    """A change of a live key. Its old and new value are plain values."""

    key: str
    old: Any
    new: Any


def patterns() -> tuple[str, ...]:
    """Return all live keys in the order of the schema, such as `policy.optimizer.kwargs.lr` and `data.datasets.*.weight`."""
    return _patterns_of(recipe_class(None))


@cache
def _patterns_of(schema: type) -> tuple[str, ...]:
    return tuple(_patterns(schema, ""))


def _patterns(kind: type, prefix: str) -> Iterator[str]:
    inner = schema_validation.sections(kind)
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Live) and prefix.startswith(mark.within):
                yield from (f"{prefix}{name}.{entry}" for entry in mark.entries) if mark.entries else (f"{prefix}{name}",)
        if name in inner:
            below, several = inner[name]
            yield from _patterns(below, f"{prefix}{name}.{ANY}." if several else f"{prefix}{name}.")


def live_key(key: str) -> str | None:
    """Return the live key that equals or contains a dotted key; None if the dotted key cannot change.

    Worked example: the live key `policy.scheduler` contains `policy.scheduler.kwargs.T_max`.
    """
    parts = key.split(".")
    for pattern in patterns():
        wanted = pattern.split(".")
        if len(parts) >= len(wanted) and all(w in (ANY, p) for w, p in zip(wanted, parts, strict=False)):
            return ".".join(parts[: len(wanted)])
    return None


def live_keys(recipe: Recipe) -> list[str]:
    """Return the live keys that a run of this recipe reads, with the recipe's names in place of `*`."""
    readers, found = unused_keys.Readers.of(recipe), []
    for pattern in patterns():
        before, star, after = pattern.partition(f".{ANY}")
        found += [f"{before}.{name}{after}" for name in value_at(recipe, before)] if star else [pattern]
    return [key for key in found if not readers.unread(key) and _has(recipe, key)]


def _has(recipe: Recipe, key: str) -> bool:
    """Return whether the section that contains a key is not null, as policy.megatron_cfg.optimizer may be."""
    return value_at(recipe, key.rpartition(".")[0]) is not None


def value_at(recipe: Recipe, key: str) -> Any:
    """Return the value at a dotted key; None if a section on the way is null or lacks it."""
    branch: Any = recipe
    for name in key.split("."):
        branch = branch.get(name) if isinstance(branch, Mapping) else getattr(branch, name, None)
    return branch


def put(recipe: Recipe, values: Mapping[str, Any]) -> None:
    """Set values at dotted keys of a recipe in place, so that all code with a reference to its sections sees them."""
    for key, value in values.items():
        *path, last = key.split(".")
        branch = value_at(recipe, ".".join(path)) if path else recipe
        if isinstance(branch, dict):
            branch[last] = value
        else:
            setattr(branch, last, value)


# ---- the check of a change ----------------------------------------------------------------------------------------------


def steered(started: Recipe, now: Recipe, given: Iterable[tuple[str, ConfigNode]]) -> list[Change]:
    """Return the changes that the overrides `given` make to a live run.

    started: the recipe with which the run's ranks started; it decides which models and outputs they have. now: this recipe
    with the changes in force. given: the result of `config_tree.parse_overrides`. Raises RecipeError with all problems: of keys
    that cannot change, and of the whole recipe with the new values.
    """
    above = loading.layer(list(given))
    keys = [key for key, _ in above.leaves()] + [key for key, node in _empty(above)]
    loaded = loading.examined(now, above)
    unknown = {problem.key for problem in loaded.problems if problem.code == "unknown-key"}
    fixed = [key for key in keys if live_key(key) is None and not config_tree.within(key, unknown)]
    refuse([*_fixed(now, fixed), *loading.independent(loaded.problems, fixed)])
    refuse(loaded.unread(loaded.recipe)[0])
    refuse(_beside(now, loaded.recipe) or _unmet(started, loaded.recipe))
    found = dict.fromkeys(name for key in keys if (name := live_key(key)))
    return [Change(key, _plain(value_at(now, key)), _plain(value_at(loaded.recipe, key))) for key in found]


def _empty(tree: ConfigMapping, prefix: str = "") -> Iterator[tuple[str, ConfigMapping]]:
    """Yield (dotted key, mapping) of each empty mapping in a tree."""
    for name, node in tree.children.items():
        if isinstance(node, ConfigMapping):
            if not node.children:
                yield f"{prefix}{name}", node
            yield from _empty(node, f"{prefix}{name}.")


def _fixed(recipe: Recipe, keys: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each of `keys`, which cannot change. The first problem lists the keys that can."""
    known, there_are = live_keys(recipe), True
    for key in keys:
        same = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]]
        near = difflib.get_close_matches(key, same or known, 1, 0.0 if same else schema_validation.SIMILAR)
        message = "is read only when a run starts" + (f"; did you mean {near[0]}?" if near else "")
        if there_are:
            message, there_are = f"{message}{'' if near else '.'} Live keys: {', '.join(known)}", False
        yield Problem(key, "not-live", message, config_tree.COMMAND_LINE)


def _beside(now: Recipe, then: Recipe) -> list[Problem]:
    """Return a problem if the change also changes a key that is not live, such as a key of a section that was null."""
    old, new = ({key: leaf.value for key, leaf in config_tree.from_plain(recipe, None).leaves()} for recipe in (now, then))
    changed = [key for key in old | new if old.get(key) != new.get(key) and live_key(key) is None]
    for key in changed[:1]:
        was = f"{old[key]} to {new.get(key)}" if key in old else f"nothing to {new[key]}"
        return [Problem(key, "not-live", f"would change too, from {was}, and is read only when a run starts")]
    return []


def _unmet(started: Recipe, then: Recipe) -> list[Problem]:
    """Return the problems of values that need models or outputs with which the run's ranks did not start."""
    problems, had, needs = [], build(started).needs, build(then).needs
    why = "but the run was started with 0 and its ranks do not compute"
    for need, key, what in (
        ("reference", "loss_fn.reference_policy_kl_penalty", "log-probs of a reference policy"),
        ("entropy", "loss_fn.entropy_coeff", "the entropy"),
    ):
        if getattr(needs, need) and not getattr(had, need):
            problems.append(Problem(key, "not-live", f"got {value_at(then, key)}, {why} {what}; expected 0"))
    if section(then).max_num_steps < 1:
        message = "got 0; expected at least 1. Try the number of the last step to run, or stop the run"
        problems.append(Problem(f"{then.algorithm}.max_num_steps", "too-small", message))
    return problems


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def parsed(values: Mapping[str, Any]) -> list[tuple[str, ConfigNode]]:
    """Return key -> plain value of live keys in the form of `config_tree.parse_overrides`. Raises RecipeError for bad keys."""
    if wrong := [key for key in values if not all(key.split("."))]:
        raise RecipeError(*(Problem(key, "bad-format", "expected a dotted key") for key in wrong))
    found = []
    for key, value in values.items():
        node = config_tree.from_plain(interpolation.escaped(value), config_tree.COMMAND_LINE)
        for branch in node.mappings() if isinstance(node, ConfigMapping) else ():
            branch.replaces = True  # the whole value, not a part of it
        found.append((key, node))
    return found

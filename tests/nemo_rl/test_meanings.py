"""Each key of NeMo-RL's that an import reads: its translation, its value if absent, and its notes.

The table is `meanings.yaml`, which explains its columns.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.recipes import nemo_rl
from launch.recipes.nemo_rl import (
    algorithm_keys,
    data_keys,
    engine_keys,
    environment_keys,
    generation_keys,
    logger_keys,
    megatron_keys,
    policy_keys,
    single_controller,
)
from launch.recipes.translation.rules import Done, Rule, Same, fits, under
from launch.recipes.translation.translator import Translator
from pipeline.config import Recipe
from tests.nemo_rl.__main__ import resolved
from tests.nemo_rl.test_translation import RECIPES
from tests.problems import named
from tests.recipes import sources

ROOT = Path(__file__).parents[2]
MEANINGS = yaml.safe_load((Path(__file__).parent / "meanings.yaml").read_text())
ROWS = [(name, key) for name, rows in MEANINGS.items() for key in rows]
NOTHING = object()
DEFAULTS = dataclasses.asdict(Recipe())

TABLES: tuple[Rule, ...] = (
    *(rule for name, rules in algorithm_keys.SECTIONS.items() for rule in under(name, rules)),
    *(rule for rules in algorithm_keys.LOSSES.values() for rule in rules),
    *(
        rule
        for model in ("policy", "value", "teacher")
        for rule in under(model, (*policy_keys.MODEL, *policy_keys.DTENSOR, *policy_keys.LORA))
    ),
    *under(
        "policy", (*megatron_keys.MEGATRON, *megatron_keys.OPTIMIZER_RULES, *megatron_keys.SCHEDULER_RULES, *megatron_keys.LORA)
    ),
    *under("policy.generation", (*generation_keys.GENERATION, *generation_keys.VLLM_RULES)),
    *(rule for rules in engine_keys.RULES.values() for rule in under("policy.generation", rules)),
    *single_controller.RULES,
    *(*logger_keys.CHECKPOINTING, *logger_keys.OTHERS, *data_keys.DATA),
    *under("env.math", environment_keys.MATH),
)
SAYS_NOTHING = (  # that a function passes over
    "logger.*",
    "data_plane.*",
    "env.unused*",
    "grpo",
    "ppo",
    "sft",
    "dpo",
    "data.validation*",  # as data.train
    "data.default.*",
    "data.add_?os",  # test_data.py
    "grpo.reward_shaping",
    "on_policy_distillation*",
    "*.use_fused_linear_logprobs",
    "*.fused_linear_logprobs_chunk_size",
    "policy.generation.colocated.resources.*",
    "policy.*_batching.*",
    "policy.sequence_packing.*",
    "policy.generation.vllm_kwargs.*",
    "policy.generation.vllm_cfg.num_*_layers_in_bf16",
    "policy.generation.vllm_cfg.is_mx",
    "policy.scheduler",
    "policy.optimizer",
    "policy.*.env_vars*",
    "value.*",  # all but these rows are the policy's
    "teacher.*",
)


def effective(layer: dict[str, Any], key: str) -> Any:
    """Return a key's value in our recipe, if an import sets it over the schema's defaults."""
    found = _at(layer, key)
    if found is not NOTHING:
        return found
    default = _at(DEFAULTS, key)
    if isinstance(default, str) and (reference := re.fullmatch(r"\$\{(\.?)([\w.]+)\}", default)):
        around = key.rpartition(".")[0] + "." if reference.group(1) else ""
        return effective(layer, around + reference.group(2))
    return default


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return NOTHING
        tree = tree[part]
    return tree


@functools.cache
def whole(name: str) -> dict[str, Any]:
    return resolved(RECIPES / f"{name}.yaml")


def translated(name: str, given: dict[str, Any], absent: str = "") -> nemo_rl.Translation:
    """Translate one of their recipes with these keys, and without `absent`."""
    tree = deepcopy(whole(name))
    for key, value in given.items():
        section, last = _section(tree, key)
        section[last] = value
    if absent:
        section, last = _section(tree, absent)
        section.pop(last, None)
    return nemo_rl.translate(tree, {}, RECIPES / f"{name}.yaml")


def _section(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return (the mapping that has a key, its name there); mappings on the path are made."""
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    return tree, last


def given_with(row: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that a row needs, with their values."""
    pairs = (pair.partition("=") for pair in row.get("with", ()))
    return {key: yaml.safe_load(value) for key, _, value in pairs}


@pytest.mark.parametrize(("name", "key"), ROWS)
def test_the_translation_of_each_key(name: str, key: str) -> None:
    row = MEANINGS[name][key]
    translation = translated(name, {**given_with(row), key: row["give"]})
    ours = row.get("ours", {key: row["give"]})
    assert {one: effective(translation.layer, one) for one in ours} == ours
    said = [note for note in (*translation.changed, *translation.ignored) if note.startswith(key)]
    if note := row.get("note"):
        assert any(one.startswith(note) for one in translation.changed), translation.changed
    elif "note" in row:
        assert said == []
    if why := row.get("ignored"):
        assert any(one.startswith(key) and why in one for one in translation.ignored), translation.ignored


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key in ROWS if "absent" in MEANINGS[name][key]])
def test_the_value_of_each_absent_key(name: str, key: str) -> None:
    row = MEANINGS[name][key]
    ours = next(iter(row.get("ours", {key: None})))
    assert effective(translated(name, given_with(row), absent=key).layer, ours) == row["absent"]


def test_every_key_that_is_read_has_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {key for _, key in ROWS}
    same = {pattern for rule in TABLES if isinstance(rule, Same) for pattern in rule.patterns}
    missing = {one for one in same if not any(fits(one, key) for key in keys) and f"{one}.*" not in same}
    assert {one for one in missing if not one.startswith(("value.", "teacher."))} == set()
    told = [pattern for rule in TABLES if not isinstance(rule, Same | Done) for pattern in rule.patterns]
    for key in _consumed(monkeypatch, tmp_path):
        if key not in keys and not any(fits(pattern, key) for pattern in (*told, *same)):
            assert any(fnmatchcase(key, pattern) for pattern in SAYS_NOTHING), key


def _consumed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[str]:
    """Return all leaves that the translation of many recipes consumes."""
    translators: list[Translator] = []

    class Kept(Translator):
        def __post_init__(self) -> None:
            translators.append(self)

    monkeypatch.setattr(nemo_rl, "Translator", Kept)
    for name in MEANINGS:
        nemo_rl.translate(whole(name), {}, RECIPES / f"{name}.yaml")
    for name in sources.names():
        if (source := sources.read(name)).is_nemo_rls:
            nemo_rl.translate(sources.tree(source, folder), {}, folder / "theirs.yaml")
    return iter(sorted(set().union(*(each.consumed for each in translators))))


def test_the_numbers_tests_exist() -> None:
    for name, key in ROWS:
        if pointer := MEANINGS[name][key].get("numbers"):
            file, _, test = pointer.partition("::")
            tree = ast.parse((ROOT / file).read_text())
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, pointer


def test_a_reference_that_ppo_skips_by_default_is_needed_for_kl() -> None:
    key = "ppo.skip_reference_policy_logprobs_calculation"
    problems = translated("ppo", {"loss_fn.reference_policy_kl_penalty": 0.1}, absent=key).problems
    assert named(problems) == {(key, "contradiction")}

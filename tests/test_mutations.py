"""Recipes with one to four random changes: each is refused with problems that name a key, or loads."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from launch.recipes import reading
from pipeline import config
from pipeline.config import config_tree, interpolation, yaml_text
from pipeline.config.loading import RECIPES
from tests.problems import named

COUNT = 400
OURS = sorted(path.stem for path in RECIPES.glob("*.yaml"))
WORDS = ("seed", "lr", "enabled", "name", "nodes", "model_name", "precision", "", "a b", "ключ", "_override_", "defaults")
VALUES = (
    *(None, True, False, 0, 1, -1, 3, 7, 10**6, 10**18, -(10**9), 0.5, -0.5, 1e-8, 1e300, float("nan"), float("inf")),
    *("", "x", "one", "1", "1e3", "true", "None", "null", "???", "/nowhere", "\0", "a: b", "äöü", "grpo", "sft", "fp8", "vllm"),
    *([], [1], ["x"], [None], [[]], [{}], [{"name": "x"}], {}, {"enabled": True}, {"x": {"y": 1}}, {"name": 1}, {"": 0}),
    *("${policy.model_name}", "${nowhere}", "${.seed}", "${..}", "${", "${oc.env:HETSTEP_NO_SUCH_VARIABLE}", "${mul:2,3}"),
    *("${div:1,0}", "${max:a,1}", "${add:${policy.train_global_batch_size},1}", "${nothing:1}", "$", "\\${x}", "${grpo}"),
)

NEMO_RL = yaml_text.parse_value((Path(__file__).parent / "nemo_rl/recipes/grpo.yaml").read_text())
del NEMO_RL["data"]["default"]["prompt_file"]  # of their repository


def places(tree: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys."""
    found = []
    for key, value in tree.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += places(value, (*path, key))
    return found


def mutated(tree: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Return a copy with one to four changes, and the changes."""
    tree, told = copy.deepcopy(tree), []
    for _ in range(draw.randint(1, 4)):
        *path, key = draw.choice(places(tree))
        section = tree
        for name in path:
            section = section[name]
        match draw.choice(("value", "value", "value", "rename", "delete", "swap", "new", "scale")):
            case "value":
                section[key] = draw.choice(VALUES)
            case "rename":
                section[key[:-1] + draw.choice("aesx") if draw.random() < 0.7 else draw.choice(WORDS)] = section.pop(key)
            case "delete":
                del section[key]
            case "swap":
                other = draw.choice(list(section))
                section[key], section[other] = section[other], section[key]
            case "new":
                section[draw.choice(WORDS)] = draw.choice(VALUES)
            case "scale" if isinstance(section[key], int | float):
                section[key] *= draw.choice((-1, 0, 3, 1000, 1e12))
        told.append(".".join([*path, key]))
        if not tree:
            break
    return tree, told


def judge(path: Path, tree: dict[str, Any]) -> config.Loaded | None:
    """Return the recipe, or None if it was refused as a whole. Messages must be readable."""
    path.write_text(json.dumps(tree, ensure_ascii=False).replace("Infinity", ".inf").replace("NaN", ".nan"))
    loaded = None
    try:
        loaded = reading.inspect(str(path))
        problems = loaded.problems
        again = config.problems(loaded.recipe)
        if not problems:
            assert list(again) == []
            text = config.to_yaml(loaded.recipe)
            assert config.format_with_origins(loaded)
            path.write_text(text)
            assert config.read(path) == loaded.recipe
    except config.RecipeError as error:
        problems = error.problems
        assert problems
    for problem in map(str, problems):
        assert re.search(r"[A-Za-z_]", problem) and len(problem) > 10, problem
        assert not re.search(r"Traceback|object at 0x|<class|dataclass|Error:|Error\(|Interpolat\w+Error", problem), problem
        assert "\n" not in problem.strip(), problem
    return loaded


def seeds() -> list[dict[str, Any]]:
    own = [config_tree.load_with_parents(config.find(name)).plain() for name in OURS]
    return [*own, *[NEMO_RL] * (len(own) // 4)]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.full] * (seed >= 1)) for seed in range(10)])
def test_a_changed_recipe_is_refused_with_reasons_or_is_a_recipe(tmp_path, seed):
    draw, trees, outcomes = random.Random(seed), seeds(), {"fine": 0, "refused": 0, "unreadable": 0}
    for number in range(COUNT // 10):
        tree, told = mutated(draw.choice(trees), draw)
        try:
            loaded = judge(tmp_path / "changed.yaml", tree)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {number}: {told}: {json.dumps(tree)}") from error
        outcomes["unreadable" if loaded is None else "refused" if loaded.problems else "fine"] += 1
    print(outcomes)
    assert outcomes["refused"] > COUNT // 30 and outcomes["fine"] > 0


def test_the_unchanged_recipes_are_valid(tmp_path):
    for name in OURS:
        assert config.inspect(name).problems == []
    (tmp_path / "theirs.yaml").write_text(json.dumps(NEMO_RL))
    loaded = reading.inspect(str(tmp_path / "theirs.yaml"))
    assert loaded.problems == []
    assert loaded.recipe.policy.train_global_batch_size == 32


def test_nemo_rls_command_line_keys_are_translated_and_ours_kept(tmp_path):
    (tmp_path / "theirs.yaml").write_text(json.dumps(NEMO_RL, indent=1))
    path = str(tmp_path / "theirs.yaml")
    loaded = reading.inspect(path, ["grpo.num_prompts_per_step=16", "cluster.train.nodes=3", "cluster.num_nodes=4"])
    assert loaded.recipe.grpo.num_prompts_per_step == 16
    assert loaded.recipe.cluster.train.nodes == 3
    assert loaded.origins["grpo.num_prompts_per_step"].startswith("the command line")
    assert loaded.origins["cluster.train.nodes"] == "the command line"
    lines = (tmp_path / "theirs.yaml").read_text().splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if '"num_generations_per_prompt"' in text]
    assert f"theirs.yaml:{line}" in loaded.origins["grpo.num_generations_per_prompt"]
    assert loaded.notes and all("\n" not in note for note in loaded.notes)
    (problem,) = reading.inspect(path, ["grpo.max_num_steps=many"]).problems
    assert (problem.origin, problem.key, problem.code) == ("the command line", "grpo.max_num_steps", "wrong-type")


def test_our_recipe_without_its_algorithm_is_not_taken_for_nemo_rls(tmp_path):
    for text in ("algoritm: grpo\n", "run_dir: x\n"):
        (tmp_path / "ours.yaml").write_text(text + "policy: {model_name: x}\ngrpo: {seed: 1}\n")
        assert ("algorithm", "missing-value") in named(config.inspect(str(tmp_path / "ours.yaml")).problems)


def test_an_interpolation_in_a_string_is_escaped_when_written(tmp_path):
    for text in ("${x}", "${sft.seed}", "a ${sft.seed} b", "a \\${x} b", "{{ '${' }}", "\\\\${x}", "plain"):
        (tmp_path / "a.yaml").write_text(
            json.dumps(
                {"algorithm": "sft", "policy": {"model_name": "x", "tokenizer": {"chat_template": interpolation.escaped(text)}}}
            )
        )
        recipe = config.load(str(tmp_path / "a.yaml"))
        assert recipe.policy.tokenizer.chat_template == text
        config.write(recipe, tmp_path / "again.yaml")
        assert config.read(tmp_path / "again.yaml").policy.tokenizer.chat_template == text

"""The reference of the schema: help=, recipes/KEYS.md, and recipes/schema.json as an editor's validator reads it."""

import json
from dataclasses import dataclass

import jsonschema
import pytest

from launch import submit
from pipeline import config
from pipeline.config import KINDS, RECIPES, reference, schema_validation, yaml_text
from pipeline.config.schema import Recipe
from pipeline.environments.environment import BuiltinEnvironment
from tests.problems import named

SHIPPED = sorted(RECIPES.glob("*.yaml"))
SCHEMA = json.loads((RECIPES / "schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@dataclass
class RequiringArguments:
    """The kwargs of `Requiring`."""

    bonus: float
    limit: int = 3


class Requiring(BuiltinEnvironment):
    """An environment with a required argument."""

    Arguments = RequiringArguments


def found(text: str) -> set[tuple[str, str]]:
    """Return the dotted path and the failing keyword of each of a validator's deepest errors."""

    def deepest(error):
        return [inner for each in error.context for inner in deepest(each)] or [error]

    errors = [inner for error in VALIDATOR.iter_errors(yaml_text.parse_value(text)) for inner in deepest(error)]
    return {(".".join(map(str, error.absolute_path)), error.validator) for error in errors}


@pytest.mark.parametrize("name", ["KEYS.md", "schema.json"])
def test_generated_files_match_the_schema(tmp_path, name):
    reference.write(tmp_path)
    assert (tmp_path / name).read_text() == (RECIPES / name).read_text(), "python -m pipeline.config.reference"


def test_every_key_has_a_type_and_a_description():
    keys = reference.keys()
    assert {key.replace("*", reference.NAME) for key in schema_validation.keys(Recipe)} == set(keys)
    assert [name for name, key in keys.items() if not key.meaning] == []
    assert [(kind, key.name) for kind, inside in reference.kwargs().items() for key in inside if not key.meaning] == []
    assert {name for name, key in keys.items() if "anything" in key.type} == {"policy.scheduler", "value.scheduler"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_name_the_schema_and_fit_it(path):
    first, *_ = path.read_text().splitlines()
    assert (path.parent / first.removeprefix("# yaml-language-server: $schema=")).samefile(RECIPES / "schema.json")
    assert found(path.read_text()) == set()


def test_the_json_schema_is_valid():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("text", "path", "keyword"),
    [
        ("grpo: {max_num_step: 5}", "grpo", "additionalProperties"),
        ("polcy: {}", "", "additionalProperties"),
        ("env: {math: {kind: math, timeout: 5}}", "env.math", "additionalProperties"),
        ("env: {math: {kind: math, kwargs: {verify: x}}}", "env.math.kwargs", "additionalProperties"),
        ("env: {judge: {kind: llm_judge, kwargs: {tries: 0}}}", "env.judge.kwargs.tries", "minimum"),
        ("grpo: {max_num_steps: many}", "grpo.max_num_steps", "type"),
        ("grpo: {max_num_steps: -1}", "grpo.max_num_steps", "minimum"),
        ("policy: {generation: {top_p: 0}}", "policy.generation.top_p", "exclusiveMinimum"),
        ("policy: {precision: fp4}", "policy.precision", "enum"),
        ("policy: {megatron_cfg: {moe_router_dtype: 3}}", "policy.megatron_cfg.moe_router_dtype", "enum"),
        ("cluster: {train: {srun_args: x}}", "cluster.train.srun_args", "type"),
        ("defaults: {a: b}", "defaults", "type"),
    ],
)
def test_an_editor_finds_errors(text, path, keyword):
    assert (path, keyword) in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "grpo: {max_num_steps: '${ppo.max_num_steps}'}",
        "defaults: [tiny_grpo, mine.yaml]",
        "value: {optimizer: '${policy.optimizer}'}",
        "policy: {optimizer: {kwargs: {_override_: true, lr: 0.1}}, scheduler: [{name: x}]}",
        "policy: {megatron_cfg: {optimizer: null, moe_router_dtype: null, scheduler: {lr_decay_iters: '???'}}}",
        "data: {train: null, datasets: {a: {weight: 1}}}",
        "env: {one: {kind: mine.Mine, kwargs: {anything: [1]}}, other: {kwargs: {pattern: x}}}",
    ],
)
def test_an_editor_accepts_valid_recipes(text):
    assert found(text) == set()


def test_help_explains_a_section_and_a_key(capsys):
    assert submit.main(["help=policy.megatron_cfg"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("policy.megatron_cfg: section\n    The Megatron-Core backend.")
    assert "policy.megatron_cfg.moe_router_dtype: fp32, fp64 or null; default fp64\n" in text
    assert "policy.megatron_cfg.optimizer.lr" not in text
    assert submit.main(["help=env.math.timeout_s"]) == 0
    assert capsys.readouterr().out == (
        "env.NAME.timeout_s: number, above 0; default 10.0\n    Time limit of one turn of an episode, in seconds.\n"
    )


def test_help_of_an_environments_kwargs_is_by_kind(capsys):
    assert submit.main(["help=env.math.kwargs"]) == 0
    _, _, judge = capsys.readouterr().out.partition("kind: llm_judge\n")
    assert judge.startswith("env.NAME.kwargs.url: string or null; default null\n")


def test_help_of_kwargs_with_a_recipe_is_of_the_kind_that_it_uses(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "raise SystemExit\ndef right(prompt, answer, expected, *, bonus=1, **fields): return 1.0\n"
        "class Own:\n    def __init__(self, scale, offset=0.5): ...\n"
    )
    (tmp_path / "own.yaml").write_text("defaults: tiny_grpo\n")
    asked = ["help=env.addition.kwargs", f"recipe={tmp_path / 'own.yaml'}"]
    assert submit.main(asked) == 0
    text = capsys.readouterr().out
    assert "kind: exact_match\nenv.NAME.kwargs.pattern: " in text and text.count("kind: ") == 1
    assert submit.main([*asked, "env.addition={_override_: true, kind: own_rewards.right}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "kind: own_rewards.right",
        "env.addition.kwargs.expected: required, here or as a column of the records",
        "env.addition.kwargs.bonus: default 1",
        "env.addition.kwargs.NAME: any other name",
    ]
    assert submit.main([*asked, "env.addition={_override_: true, kind: own_rewards.Own}"]) == 0
    kwargs = "env.addition.kwargs"
    assert capsys.readouterr().out == f"kind: own_rewards.Own\n{kwargs}.scale: required\n{kwargs}.offset: default 0.5\n"
    assert submit.main([*asked, "env.addition={_override_: true, kind: own_rewards.Owm}"]) == 2
    assert "has no Owm; did you mean Own?" in capsys.readouterr().err
    assert submit.main(["help=env.math.kwargs", asked[1]]) == 2
    assert "help: got env.math.kwargs; expected an environment of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["help=grpo.seed", "trust=true"],
        ["help=grpo.seed", "grpo.seed=3"],
        ["help=env.addition.kwargs", "env.addition.kind=math"],
        ["help=env.addition.kwargs", "recipe=tiny_grpo", "plan=true"],
        ["help=unknown-key", "follow=runs/a"],
    ],
)
def test_words_beside_help_that_it_does_not_use_are_refused(arguments, capsys):
    assert submit.main(arguments) == 2
    assert "error: help: got other keys too; expected help=KEY alone" in capsys.readouterr().err


def test_help_without_a_key_lists_the_sections(capsys):
    assert submit.main(["help="]) == 0
    heads = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert heads == [*schema_validation.fields(Recipe)]


def test_help_of_a_key_below_a_value_names_the_value(capsys):
    assert submit.main(["help=grpo.max_num_steps.x.y"]) == 2
    assert "help: got 'grpo.max_num_steps.x.y'; grpo.max_num_steps is a value, not a section" in capsys.readouterr().err


def test_help_of_a_misspelt_key_suggests_a_similar_one(capsys):
    assert submit.main(["help=policy.max_grad_nrm"]) == 2
    assert "did you mean 'policy.max_grad_norm'?" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["learning_rate", "policy.learning_rate"])
def test_help_of_another_librarys_key_names_ours(capsys, key):
    assert submit.main([f"help={key}"]) == 2
    assert "did you mean 'policy.optimizer.kwargs.lr'?" in capsys.readouterr().err


@pytest.fixture
def requiring(monkeypatch):
    """Register the kind `requiring`."""
    monkeypatch.setitem(KINDS.built_in, "requiring", f"{__name__}.Requiring")
    reference.kwargs.cache_clear()
    yield
    reference.kwargs.cache_clear()


def test_an_argument_without_default_is_required(requiring):
    assert "env.NAME.kwargs.bonus: number; required" in reference.explained("env.x.kwargs")
    assert "env.NAME.kwargs.limit: whole number; default 3" in reference.explained("env.x.kwargs")
    assert "| `bonus` | number |  |" in reference.markdown()
    assert "required" not in reference.json_schema()["$defs"]["RequiringArguments"]

    def problems(kwargs):
        override = f"env.addition={{_override_: true, kind: requiring, kwargs: {kwargs}}}"
        return named(config.inspect("tiny_grpo", [override]).problems)

    assert problems("{bonus: 1}") == set()
    assert problems("{limit: 2}") == {("env.addition.kwargs.bonus", "missing-value")}
    assert problems("{limit: x}") == {
        ("env.addition.kwargs.bonus", "missing-value"),
        ("env.addition.kwargs.limit", "wrong-type"),
    }

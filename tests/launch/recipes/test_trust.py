"""Plans and dry runs execute nothing that came with a recipe, unless the user trusts it."""

import json
import sys

import pytest

from launch import evaluate, submit, sweep
from launch.api import planning
from launch.preflight import bounded, user_imports, user_source
from launch.recipes import reading
from launch.recipes.trust import VARIABLE, Trust, may_import
from pipeline import config
from pipeline.algorithms import ALGORITHMS
from pipeline.config import user_algorithm
from tests.launch.preflight.test_user_imports import RECIPE, SMALL

HOSTILE = "from pathlib import Path\nPath({mark!r}).touch()\n"
CODE = """\
from pipeline.environments.environment import Environment
class Env(Environment):
    def step(self, prompt, text): ...
def right(prompt, answer, expected): return 1.0
def rows(split, seed): return []
class Tool: ...
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Return a folder with a stranger's recipe and its module, which leaves a mark when it is imported."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "mine.yaml").write_text(RECIPE.replace("rewards_of_mine.right", "evilmod.right"))
    (folder / "rows.jsonl").write_text(json.dumps({"input": "1+1=", "answer": "2"}) + "\n")
    (folder / "evilmod.py").write_text(HOSTILE.format(mark=str(tmp_path / "mark")) + CODE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(VARIABLE, raising=False)
    return folder


def is_marked(stranger):
    return (stranger.parent / "mark").exists()


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["env.mine.kind=evilmod.Env"],
        ["env.mine.kind=evilmod.Env", "grpo.no_such_key=1", "policy.model_name=/nowhere"],
        ["data.train={_override_: true, dataset_name: evilmod.rows, env_name: mine}"],
        ["env.mine={_override_: true, kind: tools, kwargs: {tools: {a: {kind: evilmod.Tool}}, judge: other}}"],
        ["cluster.generate.env_vars.PYTHONPATH={folder}"],
    ],
    ids=["reward", "environment", "errors", "data", "tool", "path"],
)
def test_a_strangers_code_is_not_imported(stranger, more):
    given = [each.replace("{folder}", str(stranger)) if "PYTHONPATH" in each else each for each in more]
    for command in ("plan=true", "dry_run=true"):
        submit.main([f"recipe={stranger}/mine.yaml", command, *SMALL, *given])
        assert not is_marked(stranger)


GATES = "gates: {learns: {value: last(train/loss), at_most: 1}}\n"
FORMAT = "evaluate:\n  tasks: {addition: {format: evilmod.Env}}\n"


def _needed(folder):
    (folder / "needed.yaml").write_text((folder / "mine.yaml").read_text())
    (folder / "outer.yaml").write_text("defaults: tiny_grpo\nneeds: [needed.yaml]\n")
    submit.main([f"recipe={folder}/outer.yaml", "plan=true", "cluster.executor=local"])


def _evaluation(folder):
    (folder / "suite.yaml").write_text(f"defaults: {config.RECIPES}/suites/tiny.yaml\n" + FORMAT)
    evaluate.main([f"suite={folder}/suite.yaml", "model=m", "plan=true"])


def _sweep(folder):
    (folder / "sweep.yaml").write_text(f"runs: {{one: {{recipe: {folder}/mine.yaml}}}}\nseeds: [1]\n" + GATES)
    sweep.main([f"sweep={folder}/sweep.yaml", "dry_run=true", *SMALL])


def _api(folder):
    with pytest.raises(config.RecipeError):
        planning.plan(f"{folder}/mine.yaml", {"policy.model_name": "/nowhere"})


@pytest.mark.parametrize("command", [_needed, _evaluation, _sweep, _api])
def test_other_commands_import_trusted_code_alone(stranger, monkeypatch, command):
    command(stranger)
    assert not is_marked(stranger)
    monkeypatch.setenv(VARIABLE, str(stranger))
    command(stranger)
    assert is_marked(stranger)


def test_trusted_code_is_imported(stranger, monkeypatch):
    command = [f"recipe={stranger}/mine.yaml", "dry_run=true", *SMALL]
    monkeypatch.setenv(VARIABLE, f"{stranger.parent}/here:{stranger}-else")
    submit.main(command)
    assert not is_marked(stranger)
    monkeypatch.setenv(VARIABLE, f"/nowhere:{stranger.parent}")
    submit.main(command)
    assert is_marked(stranger)
    (stranger.parent / "mark").unlink()
    monkeypatch.delenv(VARIABLE)
    submit.main([*command, "trust=true"])
    assert is_marked(stranger)


def test_an_untrusted_module_is_not_imported_by_a_trusted_one(stranger, monkeypatch):
    (stranger / "inner").mkdir()
    code = "try:\n    import evilmod\nexcept ImportError: ...\ndef right(prompt, answer): ...\n"
    (stranger / "inner/good.py").write_text(code)
    monkeypatch.setenv(VARIABLE, f"{stranger}/inner")
    given = [f"module_folders=[{stranger}/inner]", "env.mine.kind=good.right"]
    recipe = config.inspect(f"{stranger}/mine.yaml", given).recipe
    assert user_imports.probe(recipe, Trust.LISTED)["env.mine.kind"].get("ok")
    assert not is_marked(stranger)
    assert "read" in user_imports.probe(recipe, Trust.NOTHING)["env.mine.kind"]


def test_a_trusted_algorithm_imports_nothing_of_a_stranger(tmp_path, monkeypatch):
    """Neither by an optional import nor in the place of a package without `__init__`."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (mine / "alg").mkdir(parents=True)
    theirs.mkdir()
    (theirs / "opt_of_theirs.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    (theirs / "alg.py").write_text("import opt_of_theirs")
    code = "try:\n    import opt_of_theirs\nexcept ImportError: ...\n"
    code += "from pipeline.algorithms.sft import SFT as Base\nclass Mine(Base): ...\n"
    (mine / "trusted_algorithm.py").write_text(code)
    monkeypatch.setenv(VARIABLE, str(mine))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for path in ("trusted_algorithm.Mine", "alg.Mine"):
        reading.inspect("tiny_sft", [f"algorithm={path}", f"module_folders=[{theirs},{mine}]"])
    del ALGORITHMS["trusted_algorithm"]
    user_algorithm._paths.clear()
    assert not (tmp_path / "mark").exists()
    assert may_import("trusted_algorithm.Mine", [str(theirs), str(mine)]) == [str(mine)]
    assert may_import("opt_of_theirs.Mine", [str(theirs), str(mine)]) is None


# ---- what the source shows ---------------------------------------------------------------------------------------------------

SOURCES = {
    "made": "import dataclasses, functools\nfrom made_base import Base, Environment, helper as renamed\n"
    "@functools.cache\ndef cached(a): ...\n"
    "@dataclasses.dataclass\nclass Data(Base):\n    scale: float\n"
    "class Derived(Base):\n    def __init__(self, scale, *, bias=0): ...\n"
    "class Later(Base):\n    async def reset(self): ...\n    step = None\n"
    "class Abstract(Environment):\n    def reset(self, prompt): ...\nbuiltin = print\n"
    "class Foreign(dataclasses.Field): ...\n"
    "lam = lambda prompt, answer, level: 1.0\nnumber = 3\nalias = renamed\n"
    "if number:\n    def inside(prompt, answer): ...\n"
    "class Scored:\n    def __init__(self, scale=1): ...\n    def __call__(self, prompt, answer, level): ...\n"
    "scored = Scored(scale=2)\ngiven = functools.partial(renamed, weight=1)\n"
    "def of_batch(completions, level, **columns): ...\ndef unnamed(prompts, completions, /): ...\n"
    "def with_tools(completions, environments): ...\ndef compute_scores(solution_strs, ground_truths): ...\n"
    "def compute_more(solution_str, level): ...\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...\n"
    "async def later(prompt, answer): ...\ndef batch(prompts, completions): ...\n"
    "def few(prompt): ...\ndef spread(*texts, **fields): ...\n",
    "made_base": "import abc\nfrom pipeline.environments.environment import Environment\n"
    "class Base(Environment):\n    def step(self, prompt, text): ...\n"
    "def helper(prompt, answer, weight, level=1): ...\n",
    "dynamic": "def __getattr__(name): return print\n",
    "circle": "from circle_b import right\n",
    "circle_b": "from circle import right\n",
    "nulls": "right = 1\0\n",
    "deep": "right = " + "(" * 50_000,
    "longer": "right = " + "-" * 200_000 + "1",
    "optional": "try:\n    from fast import right\nexcept ImportError:\n    right = None\n",
    "made_later": "globals()['right'] = print\n",
    "within": "if (right := print): ...\nright_too: 'print'\n",
    "twice": "def right(prompt, answer, prompt): ...\n",
}


@pytest.mark.parametrize(
    ("path", "kwargs", "expected"),
    [
        ("made.Derived", ("scale",), {"ok": True}),
        ("made.Derived", ("scal",), {"code": "wrong-type"}),
        ("made.Derived", ("scale", "bias"), {"ok": True}),
        ("made.Data", ("anything",), {"ok": True}),  # its decorator makes the parameters
        ("made.Later", (), {"ok": True}),  # its attributes may replace methods
        ("made.Abstract", (), {"code": "wrong-type"}),
        ("made.builtin", (), {"ok": True}),
        ("made.Foreign", (), {"ok": True}),
        ("made.cached", (), {"ok": True}),
        ("made.lam", ("level",), {"ok": True, "fields": ["level"], "required": ["level"]}),
        ("made.lam", ("other",), {"code": "unknown-key"}),
        ("made.alias", (), {"ok": True, "fields": ["weight", "level"], "required": ["weight"]}),
        ("made.renamed", (), {"ok": True, "required": ["weight"]}),
        ("made.inside", (), {"ok": True}),
        ("made.number", (), {"code": "wrong-type"}),
        ("made.later", (), {"ok": True, "fields": [], "required": []}),
        ("made.batch", (), {"ok": True, "fields": [], "required": []}),
        ("made.Scored", ("scale",), {"ok": True, "fields": ["level"], "required": ["level"]}),
        ("made.Scored", ("scal",), {"code": "unknown-key"}),
        ("made.scored", (), {"ok": True, "fields": ["level"], "required": ["level"]}),
        ("made.given", (), {"ok": True, "fields": ["weight", "level"], "required": []}),
        ("made.given", ("other",), {"code": "unknown-key"}),
        ("made.of_batch", (), {"ok": True, "fields": None, "required": ["level"]}),
        ("made.unnamed", (), {"code": "wrong-type"}),
        ("made.with_tools", (), {"code": "wrong-type"}),
        ("made.compute_score", (), {"ok": True, "fields": ["data_source", "ground_truth", "extra_info"]}),
        ("made.compute_scores", (), {"code": "wrong-type"}),
        ("made.compute_more", (), {"code": "wrong-type"}),
        ("made.compute_more", ("level",), {"ok": True}),
        ("made.few", (), {"code": "wrong-type"}),
        ("made.spread", ("x",), {"ok": True, "fields": None}),
        ("made.absent", (), {"code": "not-importable"}),
        ("made.inner.absent", (), {"code": "not-importable"}),
        ("dynamic.anything", (), {"ok": True}),
        ("circle.right", (), {"ok": True}),
        ("json.dump", ("cls",), {"ok": True}),
        ("json.lods", (), {"code": "not-importable"}),
        ("nulls.right", (), {"foreign": False}),
        ("deep.right", (), {"foreign": False}),
        ("longer.right", (), {"foreign": False}),
        ("optional.right", (), {"ok": True}),
        ("made_later.right", (), {"ok": True}),
        ("within.right", (), {"ok": True}),
        ("within.right_too", (), {"code": "not-importable"}),
        ("twice.right", (), {"foreign": False}),
    ],
)
def test_what_the_source_shows(tmp_path, path, kwargs, expected):
    for name, text in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(text)
    reply = user_source.describe(path, "environment", kwargs, [tmp_path])
    assert {key: reply.get(key) for key in expected} == expected, reply


@pytest.mark.parametrize(("seconds", "reason"), [(5.0, "it raised RecursionError"), (0.01, "it took more than 0.01 s")])
def test_a_source_is_read_within_bounds(stranger, monkeypatch, seconds, reason):
    monkeypatch.setattr(bounded, "SECONDS", seconds)
    (stranger / "evilmod.py").write_text("".join(f"x{i} = x{i + 1}\n" for i in range(2000)) + "right = x0\n")
    recipe = config.inspect(f"{stranger}/mine.yaml").recipe
    replies, notes = user_imports.probe(recipe, Trust.NOTHING), []
    assert replies["env.mine.kind"].keys() == {"unchecked"}
    assert not list(user_imports.problems(recipe, "local", notes, replies))
    assert "evilmod.right was not checked" in notes[0] and reason in notes[0]


def test_classes_with_shared_bases_are_read_once(tmp_path):
    """Without that, this takes as many readings as there are paths through the classes, 2 to the 24th."""
    pairs = "".join(f"class C{i}(C{i + 1}, D{i + 1}): ...\nclass D{i}(C{i + 1}, D{i + 1}): ...\n" for i in range(24))
    (tmp_path / "ladder.py").write_text(pairs + "class C24: ...\nclass D24: ...\n")
    assert user_source.describe("ladder.C0", "environment", (), [tmp_path])["code"] == "wrong-type"

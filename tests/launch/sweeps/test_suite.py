"""A suite's YAML: all its errors are reported at once, before anything is written or submitted."""

import pytest

from launch import sweep
from launch.sweeps import suite
from pipeline.config import config_tree
from tests.launch.sweeps.suites import write_suite
from tests.problems import refused

SUITES = sorted(path.stem for path in suite.SUITES.glob("*.yaml"))


@pytest.mark.parametrize("name", sorted({"tiny", "nightly", "convergence", *SUITES}))
def test_a_shipped_suite_loads_and_survives_a_round_trip(tmp_path, name):
    asked = suite.load(name)
    assert asked.suite.name == name and asked.baseline == suite.SUITES / f"baselines/{name}.yaml"
    (tmp_path / "suite.yaml").write_text(suite.to_yaml(asked.suite))
    assert suite.read(tmp_path / "suite.yaml") == asked.suite


def test_all_problems_come_in_one_list(tmp_path):
    text = """
seeds: [1, 1]
max_concurent: 3
retries: -1
runs:
  one:
    overrides: {run_dir: x, grpo: {seed: 3}}
    gates:
      no such statistic: {value: lst(loss), at_most: 1}
      nothing to fail: {value: last(loss)}
      nothing passes: {value: last(loss), at_least: 3, at_most: 2}
      no metric: {value: 1 + 1, at_most: 2}
      two kinds: {value: last(loss), at_most: 2, band: {}}
      exact and more: {value: last(loss), equals: 2, at_most: 3}
      bad band: {value: last(loss), band: {spreads: -1, better: up}}
      bad ratio: {value: last(loss), speed: {at_most: 0.5}}
      no ratio: {value: last(loss), speed: {}}
      bad over: {value: last(loss), at_most: 1, over: sum}
      other: {same_as: {run: too}}
      itself: {same_as: {run: one}, value: last(loss)}
      misspelt: {value: last(loss), speed: {atmost: 2}}
  two: {seeds: words, gates: {slow: {value: last(t), speed: {at_most: 2, relative_to: three}}}}
  three: {seeds: [7]}
  four: {seeds: [5], gates: {point: {value: last(loss), band: {}}}}
gates:
  shared: {value: last(loss), at_most: 1, runs: [to]}
"""
    (tmp_path / "some.yaml").write_text(text)
    gates = {
        "no such statistic.value": "bad-format",
        "nothing to fail": "missing-value",
        "nothing passes.at_least": "contradiction",
        "no metric.value": "bad-format",
        "two kinds": "contradiction",
        "exact and more.equals": "contradiction",
        "bad band.band.better": "not-a-choice",
        "bad band.band.spreads": "too-small",
        "bad ratio.speed.at_most": "too-small",
        "no ratio.speed": "missing-value",
        "bad over.over": "not-a-choice",
        "other.same_as.run": "not-a-choice",
        "itself.same_as.run": "contradiction",
        "itself.value": "has-no-effect",
        "misspelt.speed.atmost": "unknown-key",
    }
    with refused(
        ("max_concurrnt", "unknown-key"),
        ("run_dir", "contradiction"),
        ("max_concurent", "unknown-key"),
        ("runs.two.seeds", "wrong-type"),
        ("retries", "too-small"),
        ("seeds", "given-twice"),
        ("gates.shared.runs", "not-a-choice"),
        ("runs.one.overrides.run_dir", "contradiction"),
        ("runs.one.overrides.grpo.seed", "contradiction"),
        *((f"runs.one.gates.{name}", code) for name, code in gates.items()),
        ("runs.two.gates.slow.speed.relative_to", "contradiction"),
        ("runs.four.gates.point.band.floor", "missing-value"),
        ("runs.three.gates", "missing-value"),
    ) as error:
        suite.load(str(tmp_path / "some.yaml"), ["max_concurrnt=3", "run_dir=x", "grpo.max_num_steps=3"])
    assert "some.yaml:3: max_concurent: " in str(error.value)


def test_a_suite_without_runs_and_an_unknown_suite_are_refused(tmp_path):
    (tmp_path / "some.yaml").write_text("seeds: [1]")
    for name, problem in ((str(tmp_path / "some.yaml"), ("runs", "missing-value")), ("nightyl", ("sweep", "file-not-found"))):
        with refused(problem):
            suite.load(name)


def test_the_command_line_changes_the_suite_or_every_recipe(tmp_path):
    path = write_suite(tmp_path)
    asked = suite.load(str(path), ["seeds=[4]", "runs.a.overrides.grpo.max_num_steps=7", "cluster.time_min=5"])
    assert (asked.suite.seeds, asked.overrides) == ([4], ["cluster.time_min=5"])
    assert suite.as_arguments(asked.suite.runs["a"].overrides) == ["policy.optimizer.kwargs.lr=0.5", "grpo.max_num_steps=7"]
    assert suite.as_arguments(asked.suite.runs["b"].overrides) == ["policy.optimizer.kwargs.lr=0.5"]


def test_overrides_become_command_line_arguments():
    given = {"a": {"b": 1.5, "c": [1, "x y"], "d": None}, "e.f": "it's: so", "g": {}, "h": True, "i": "true", "j": "Wait..."}
    told = suite.as_arguments(given)
    assert [each.partition("=")[0] for each in told] == ["a.b", "a.c", "a.d", "e.f", "g", "h", "i", "j"]
    read = [node for each in told for _, node in config_tree.parse_overrides([each])]
    values = [node.plain() if isinstance(node, config_tree.ConfigMapping) else [node.value] for node in read]
    assert values == [[1.5], [[1, "x y"]], [None], ["it's: so"], {}, [True], ["true"], ["Wait..."]]


def test_problems_of_all_runs_recipes_come_in_one_list_and_nothing_is_written(tmp_path, capsys):
    path = write_suite(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    wrong = ["runs.a.overrides.grpo.max_num_step=3", "runs.b.overrides.policy.model_name=nowhere", "update_baseline=true"]
    assert sweep.main([f"sweep={path}", *wrong]) == 2
    said = capsys.readouterr().err
    assert said.count("run 'a': ") == 1, said  # told once, not for every seed
    assert "run 'a': the command line: grpo.max_num_step: " in said and "run 'b': policy.model_name: " in said
    assert sorted(tmp_path.rglob("*")) == before


def test_dry_run_writes_nothing(tmp_path, capsys):
    path = write_suite(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert sweep.main([f"sweep={path}", "dry_run=true", "id=x"]) == 0
    out = capsys.readouterr().out
    assert f"4 jobs on local, at most 2 at once, in {tmp_path}/sweeps/some/x" in out
    assert [line.partition(":")[0] for line in out.splitlines()[-4:]] == ["a-1", "b-1", "a-2", "b-2"]
    assert "grpo.seed=2" in out.splitlines()[-1]
    assert "# no baseline yet" in out
    assert sorted(tmp_path.rglob("*")) == before

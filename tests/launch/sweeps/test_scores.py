"""Gates on scores: bounds, and paired comparisons that a planted worse checkpoint fails."""

import os
from pathlib import Path

import pytest
import yaml

from launch.runs import suites as evaluation_suites
from launch.sweeps.expressions import RunMeasurements
from launch.sweeps.gates import (
    Baseline,
    GateCase,
    GateResult,
    Provenance,
    StoredRun,
    Sweep,
    judge,
    read_baseline,
    write_baseline,
)
from launch.sweeps.suite import BandConfig, EvaluationGateConfig, GateConfig, RunConfig, Suite, load
from launch.sweeps.verdict import missing_evaluations
from tests.evaluation import made
from tests.launch import made_runs
from tests.launch.sweeps.suites import outcomes, write_suite
from tests.launch.sweeps.suites import sweep as run_sweep
from tests.problems import refused

PASSED, FAILED = GateResult.PASSED, GateResult.FAILED


def trained(path: Path, solved: float, step: int = 20, evaluated: int | None = None, seed: int = 1) -> RunMeasurements:
    """Write a run of `step` steps whose checkpoint solves a share of the questions of the suite `tiny`."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("algorithm: sft\n")
    made_runs.ended(path, step)
    kept = made.answers(80, 1, solved=solved, seed=seed)
    made.evaluation(path, step if evaluated is None else evaluated, {"addition": kept}, suite="tiny")
    return RunMeasurements({}, None, folder=path)


def sweep(tmp_path, asked: dict, shares: dict[str, float], baseline=None, **gate):
    """Return a sweep of runs of two seeds each, with a gate on the run `a`. shares: solved questions by run."""
    runs = {
        name: {seed: trained(tmp_path / f"{name}-{seed}", share, seed=seed) for seed in (1, 2)}
        for name, share in shares.items()
    }
    of_a = GateConfig(**gate, evaluation=EvaluationGateConfig("tiny", "addition", **asked))
    configs = {name: RunConfig(gates={"g": of_a} if name == "a" else {}) for name in runs}
    return Sweep(Suite("s", [1, 2], runs=configs), runs, baseline)


def verdict(*arguments, **keys):
    (found,) = judge(sweep(*arguments, **keys))
    return found


@pytest.mark.parametrize(("bounds", "outcome"), [({"at_least": 0.5}, PASSED), ({"at_least": 0.95}, FAILED)])
def test_bounds_on_a_score(tmp_path, bounds, outcome):
    found = verdict(tmp_path, {}, {"a": 0.8}, **bounds)
    assert found.outcome is outcome and [*found.values] == [1, 2] and all(0.6 < value < 0.9 for value in found.values.values())


@pytest.mark.parametrize(
    ("share", "margin", "outcome", "said"),
    [
        (0.4, None, FAILED, "worse: -0."),  # the planted worse checkpoint
        (0.8, None, PASSED, "cannot tell: +0.0000"),
        (0.79, None, PASSED, "cannot tell: "),
        (0.99, None, PASSED, "better: +0."),
        (0.6, 0.02, FAILED, "expected a loss of at most 0.02"),
        (0.99, 0.02, PASSED, "better: +0."),
    ],
)
def test_a_run_is_compared_with_another_question_by_question(tmp_path, share, margin, outcome, said):
    found = verdict(tmp_path, {"not_worse_than": "b", "margin": margin}, {"a": share, "b": 0.8})
    assert found.outcome is outcome and said in found.message and "80 questions" in found.message, found.message


@pytest.mark.parametrize(("share", "outcome"), [(0.4, FAILED), (0.8, PASSED)])
def test_a_stored_evaluation_and_the_baseline_are_references(tmp_path, share, outcome):
    before = trained(tmp_path / "before", 0.8).folder
    assert before is not None
    folder = str(before / "evaluations/tiny/step_000020")
    assert verdict(tmp_path / "stored", {"not_worse_than": folder}, {"a": share}).outcome is outcome

    asked = {"not_worse_than": "baseline"}
    good = sweep(tmp_path / "good", asked, {"a": 0.8})
    (case,) = good.cases("a")
    assert "there is no baseline yet" in case.verdict().message and case.gate.needs_baseline
    stored = Baseline(Provenance("s", "2026-01-01"), {"a": StoredRun(gates={"g": case.to_store()})})
    write_baseline(stored, tmp_path / "baseline.yaml")
    again = read_baseline(tmp_path / "baseline.yaml")
    assert again == stored and len(stored.runs["a"].gates["g"].questions) == 80
    assert verdict(tmp_path / "now", asked, {"a": share}, again).outcome is outcome


def test_a_band_around_scores(tmp_path):
    band = {"band": BandConfig(better="higher", floor=0.02)}
    (case,) = sweep(tmp_path / "before", {}, {"a": 0.8}, **band).cases("a")
    before = Baseline(Provenance("s", "2026-01-01"), {"a": StoredRun(gates={"g": case.to_store()})})
    assert case.to_store().value == "score of addition in tiny"
    assert verdict(tmp_path / "same", {}, {"a": 0.8}, before, **band).outcome is PASSED
    assert verdict(tmp_path / "worse", {}, {"a": 0.4}, before, **band).outcome is FAILED


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"step": 10}, "has no evaluation with the suite tiny at step 10"),
        ({"task": "subtraction"}, "has no task subtraction; it has addition"),
        ({"metric": "pass@8"}, "addition has no pass@8; it has accuracy"),
        ({"not_worse_than": "somewhere/else"}, "somewhere/else has no scores.json"),
    ],
)
def test_a_gate_without_a_score_fails(tmp_path, asked, said):
    keys = {"suite": "tiny", "task": "addition", **asked}
    bounds = {} if "not_worse_than" in asked else {"at_least": 0.0}
    made_up = sweep(tmp_path, {}, {"a": 0.8}, **bounds)
    gate = GateConfig(**bounds, evaluation=EvaluationGateConfig(**keys))
    found = GateCase(made_up, "a", "g", gate).verdict()
    assert found.outcome is FAILED and said in found.message


def test_an_evaluation_of_an_earlier_step_does_not_count(tmp_path):
    run = trained(tmp_path / "a-1", 0.8, step=20, evaluated=10).folder
    assert run is not None
    suite = Suite("s", [1], runs={"a": RunConfig(gates={"g": GateConfig(evaluation=EvaluationGateConfig("tiny", "addition"))})})
    assert [*missing_evaluations(suite, "a", run)] == [("suite=tiny", f"run={run}", "step=20")]
    made.evaluation(run, 20, {"addition": made.answers()}, suite="tiny")
    assert [*missing_evaluations(suite, "a", run)] == []
    assert evaluation_suites.find("tiny")[0] == "tiny"


ASKED = {"suite": "tiny", "task": "addition"}


@pytest.mark.parametrize(
    ("gate", "key", "code"),
    [
        ({"evaluation": {"suite": "tiny"}, "at_least": 0}, "evaluation.task", "missing-value"),
        ({"evaluation": {**ASKED, "suite": "tinny"}, "at_least": 0}, "evaluation.suite", "file-not-found"),
        ({"evaluation": {**ASKED, "task": "additon"}, "at_least": 0}, "evaluation.task", "not-a-choice"),
        ({"evaluation": ASKED}, "", "missing-value"),
        ({"evaluation": {**ASKED, "not_worse_than": "c"}}, "evaluation.not_worse_than", "not-a-choice"),
        ({"evaluation": {**ASKED, "not_worse_than": "a"}}, "evaluation.not_worse_than", "contradiction"),
        ({"evaluation": {**ASKED, "not_worse_than": "b"}, "over": "mean"}, "over", "has-no-effect"),
        (
            {"evaluation": {"suite": "bias", "task": "winobias", "not_worse_than": "b"}},
            "evaluation.not_worse_than",
            "unsupported",
        ),
        ({"evaluation": ASKED, "value": "last(loss)", "at_most": 1}, "value", "contradiction"),
        ({"evaluation": {**ASKED, "margin": 0.1}, "at_least": 0}, "evaluation.margin", "has-no-effect"),
    ],
)
def test_faulty_gates_are_refused(tmp_path, gate, key, code):
    runs = {"a": {"gates": {"g": gate}}, "b": {"gates": {"h": {"value": "last(loss)", "at_most": 1}}}}
    path = write_suite(tmp_path, gates={}, runs=runs)
    with refused((f"runs.a.gates.g.{key}".rstrip("."), code)):
        load(str(path))


@pytest.mark.long
def test_a_planted_worse_checkpoint_fails_the_gate(tmp_path):
    """Three trainings, and the check's evaluations of them, which no run has asked for."""

    def trained(steps: int, gates: dict) -> dict:
        return {"recipe": "tiny_sft", "overrides": {"sft": {"max_num_steps": steps}}, "gates": gates}

    gate = {"as good": {"evaluation": {"suite": "tiny", "task": "addition", "not_worse_than": "good"}}}
    runs = {
        "good": trained(150, {"learns": {"evaluation": {"suite": "tiny", "task": "addition"}, "at_least": 0.1}}),
        "planted": trained(4, gate),
        "same": trained(150, gate),
    }
    overrides = {"cluster": {"executor": "local", "train": {"ranks_per_node": 1}}}
    suite = {"seeds": [1], "max_concurrent": 1, "folder": str(tmp_path), "overrides": overrides, "runs": runs}
    (tmp_path / "planted.yaml").write_text(yaml.safe_dump(suite))
    status, output = run_sweep(f"sweep={tmp_path / 'planted.yaml'}", "id=a", env={**os.environ}, timeout=580)
    assert status == 1, output
    found = outcomes(tmp_path / "planted/a")
    assert {run: found[run, gate] for run, gate in found if "completes" not in gate} == {
        "good": "passed",
        "planted": "failed",
        "same": "passed",
    }
    assert "planted, as good: worse: -0." in output

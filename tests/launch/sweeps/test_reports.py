"""Sweep reports for CI tools, terminals and browsers."""

import html
import json
import re
import socket
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launch.executors.record import JobRecord, write_record
from launch.sweeps import gates, suite, verdict
from launch.sweeps.submission import jobs_of
from launch.sweeps.sweep_folder import SweepFolder, SweepPlan
from launch.sweeps.verdict import junit, markdown, page
from tests.launch.sweeps.suites import write_suite

SLOW = {"b": {"time/step": 0.15}}


def finished(folder: Path, values: dict, lr: float = 0.5, **changes):
    """Write a sweep whose runs have all ended, without running them. values: run -> metrics that replace the usual ones."""
    path = write_suite(folder, **changes)
    asked = suite.load(str(path), [f"runs.a.overrides.policy.optimizer.kwargs.lr={lr}"])
    place = SweepFolder(folder / f"sweeps/some/{len(list(folder.glob('sweeps/some/*')))}")
    jobs, executor, _ = jobs_of(asked, place.path)
    with place.locked():
        place.begin(asked.suite, SweepPlan(place.path.name, executor, str(folder), str(asked.baseline), [], jobs))
    for job in jobs:
        run_dir = Path(job.run_dir)
        attempt = run_dir / "attempts/local-4000000-1-0"
        attempt.mkdir(parents=True)
        (attempt / "started").write_text(str(time.time()))
        (attempt / "nodes.json").write_text(json.dumps({"nodes": {"x": {"gpus": [], "cpu": "2 x slide rule"}}}))
        usual = {"train/ppo_kl": 0.0, "time/step": 0.1, "train/loss": job.seed * (1.0 if lr == 0.5 or job.run == "b" else 10.0)}
        lines = [{"step": step, "time": time.time(), **usual, **values.get(job.run, {})} for step in range(1, 4)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run_dir / "done.json").write_text('{"step": 3}')
        place.record(job.name, "1")
    return place


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Return (a sweep that became the baseline, one with two regressions)."""
    tmp_path = tmp_path_factory.mktemp("sweeps")
    good = finished(tmp_path, {})
    good.request_baseline(True)
    first = verdict.conclude(good)
    assert first.passed and gates.read_baseline(tmp_path / "baselines/some.yaml").of("a").hardware == "2 x slide rule"
    return first, verdict.conclude(finished(tmp_path, SLOW, lr=5.0))


def test_planted_regressions_fail_the_gates_that_they_should_and_no_others(sweeps):
    _, bad = sweeps
    assert not bad.passed
    told = {(each.run, each.gate): each.message for each in bad.failed}
    assert told.keys() == {("a", "loss"), ("b", "speed")}
    assert told["b", "speed"].endswith("1.5 times the baseline's 0.1; expected at most 1.25 times")
    assert told["a", "loss"].startswith("15, mean of the seeds; expected at most 3.621 (baseline 1.5, band 2.12)")
    assert bad.notes == [
        "a has other overrides than in the baseline: +policy.optimizer.kwargs.lr=5.0 -policy.optimizer.kwargs.lr=0.5"
    ]
    assert bad.summary == "some 1: FAILED: 8 passed, 2 failed"


def test_junit_has_a_case_for_each_gate(sweeps):
    for result in sweeps:
        root = ElementTree.fromstring(junit(result))
        assert root.tag == "testsuites" and [suite.get("name") for suite in root] == ["some.a", "some.b"]
        cases = list(root.iter("testcase"))
        gates = ["seed 1 completes", "seed 2 completes", "on policy", "loss", "speed"]
        assert [(case.get("classname"), case.get("name")) for case in cases] == [
            (f"some.{run}", gate) for run in ("a", "b") for gate in gates
        ]
        failed = {case.get("classname") + "/" + case.get("name") for case in cases if case.find("failure") is not None}
        assert failed == {f"some.{each.run}/{each.gate}" for each in result.failed}
        for element in (root, *root):
            assert int(element.get("tests")) == len(list(element.iter("testcase")))
            assert int(element.get("failures")) == len(list(element.iter("failure")))
            assert int(element.get("skipped")) == len(list(element.iter("skipped")))
            assert float(element.get("time")) >= 0
    failure = next(case.find("failure") for case in cases if case.get("name") == "speed" and case.find("failure") is not None)
    assert "1.5 times" in failure.get("message") and "seed 2: 0.15" in failure.text


def test_an_unjudged_gate_is_skipped_in_junit_and_listed_elsewhere(tmp_path):
    good = finished(tmp_path, {})
    good.request_baseline(True)
    verdict.conclude(good)
    text = (tmp_path / "baselines/some.yaml").read_text()
    (tmp_path / "baselines/some.yaml").write_text(text.replace("2 x slide rule", "1 x abacus"))
    result = verdict.conclude(finished(tmp_path, SLOW))
    assert result.passed and result.summary == "some 1: passed: 8 passed, 2 not judged"
    root = ElementTree.fromstring(junit(result))
    said = "ran on 2 x slide rule; expected the baseline's hardware: 1 x abacus"
    assert [skipped.get("message") for skipped in root.iter("skipped")] == [said, said]
    assert root.get("skipped") == "2"
    assert f"| a | speed | ⚠️ not judged | {said} |" in markdown(result)
    assert said in html.unescape(page(result))


def test_failures_come_first_in_markdown(sweeps):
    good, bad = (markdown(result) for result in sweeps)
    assert good.startswith("# some 0: passed") and "## Failed" not in good
    lines = bad.splitlines()
    assert lines[0] == "# some 1: failed" and lines[4] == "## Failed"
    assert lines[6].startswith("- **a, loss**: 15, mean of the seeds")
    assert lines[7].startswith("- **b, speed**: 0.15, median of the seeds; 1.5 times")
    assert "the baseline is from 20" in lines[-1] and "some 0, commit" in lines[-1]


def test_the_page_is_valid_and_shows_failures_first(sweeps):
    _, bad = sweeps
    text = page(bad)
    assert text.startswith("<!DOCTYPE html>") and ' href="http' not in text
    assert re.findall(' src="[^"]*"', text) == [' src="plotly.min.js"']
    assert text.index(">Failed<") < text.index(">Gates<") < text.index(">Runs<")
    for said in ("a: train/loss", "b: time/step", "seed 1", "all seeds", "loss: max", "has other overrides"):
        assert said in text


def test_hostile_text_of_a_run_cannot_break_a_report(tmp_path):
    place = finished(tmp_path, {})
    job = place.plan.jobs[0]
    (Path(job.run_dir) / "done.json").unlink()
    write_record(Path(job.run_dir), JobRecord("local", "4000000", socket.gethostname(), 1))
    said = {"rank": 0, "realm": "train", "host": "x", "verb": "", "phase": "", "message": "\x1b[31m<b>|`&]]>\x00\ud800\nend"}
    (Path(job.run_dir) / "attempts/local-4000000-1-0/failure.json").write_text(json.dumps(said))
    result = verdict.conclude(place)
    failure = next(ElementTree.fromstring(junit(result)).iter("failure"))
    assert "rank 0 (realm train, host x): ?[31m<b>|`&]]>??" in failure.get("message")
    row = next(line for line in markdown(result).splitlines() if line.startswith("| a | seed 1 completes"))
    assert row.count(" | ") == 3 and "<b>" not in row
    assert "<b>" not in page(result)
    for report in (junit, markdown, page):
        report(result).encode()


def test_a_failed_sweep_becomes_no_baseline(tmp_path):
    place = finished(tmp_path, {"a": {"train/ppo_kl": 1e-9}})
    place.request_baseline(True)
    result = verdict.conclude(place)
    assert "not written: a, on policy: seed 1: 1e-09, seed 2: 1e-09; expected 0 exactly" in [
        each.message for each in result.failed
    ]
    assert not (tmp_path / "baselines").exists()
    lacking = finished(tmp_path, {"a": {"time/step": None}})
    lacking.request_baseline(True)
    assert any(
        "not written: a, speed: min(time/step) of a has no value" in each.message for each in verdict.conclude(lacking).failed
    )

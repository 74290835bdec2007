"""`make gpu-check` without a GPU, the results of its parts, and, on the CPU at tiny sizes, the whole check."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline import config
from tests.gpu_check import parts, table
from tests.gpu_check.__main__ import main, run
from tests.gpu_check.parts import Part, Setting
from tests.gpu_check.table import FAILED, LEFT_OUT, PASSED, Result
from tests.launch.waiting import alive, reports

ROOT = Path(__file__).parents[2]


def setting(folder: Path) -> Setting:
    return Setting("cpu", "tiny", folder)


def python(program: str, judge=parts._judge_measurement, needs: tuple[str, ...] = ()) -> Part:
    return Part("train: x", needs, [sys.executable, "-c", program], judge)


def test_without_a_gpu_the_check_reports_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "there is no GPU that torch" in capsys.readouterr().out
    assert not (tmp_path / "gpu_check.json").exists()


def test_missing_required_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(parts, "CORE", ("numpy", "no_such_package", "yaml"))
    assert main(["device=cpu"]) == 2
    assert "without no_such_package nothing runs. Try pip install no_such_package" in capsys.readouterr().out
    assert main(["devise=cpu"]) == 2
    assert "got devise=cpu; expected one of parts=..., out=..." in capsys.readouterr().out


def test_an_unknown_part_is_refused_with_the_known_ones(capsys, tmp_path):
    assert main(["device=cpu", "parts=train,foo", f"out={tmp_path / 'out.json'}"]) == 2
    told = capsys.readouterr().out
    assert "parts: got foo; expected beginnings of tests: nodes, " in told and "train: FSDP2" in told
    assert not (tmp_path / "out.json").exists()


def test_a_part_whose_packages_are_missing_is_left_out(tmp_path):
    result = run(python("raise SystemExit(1)", needs=("numpy", "no_such_package")), setting(tmp_path))
    assert (result.outcome, result.note) == (LEFT_OUT, "not installed: no_such_package")


@pytest.mark.parametrize(
    ("program", "outcome", "note"),
    [
        ("""print('gpu_check: {"numbers": {"tokens/s": 7}, "note": "n"}')""", PASSED, "n"),
        ("raise SystemExit(3)", FAILED, "it ended with status 3"),
        ("pass", FAILED, "it ended with status 0"),
        ("import os; os.abort()", FAILED, "it ended with status -6"),
    ],
)
def test_results_of_a_measurement(tmp_path, program, outcome, note):
    result = run(python(program), setting(tmp_path))
    assert (result.outcome, result.note) == (outcome, note)


def test_a_part_that_does_not_end_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu_check.__main__.LIMIT_S", 0.2)
    result = run(python("print('far', flush=True); import time; time.sleep(60)"), setting(tmp_path))
    assert (result.outcome, result.note) == (FAILED, "it has not ended within 0.2 s")


@pytest.mark.full
def test_all_processes_of_a_part_are_ended(tmp_path):
    """Both those that it started in its own session and its run's ranks, whose controller has another."""
    program = f"""
import subprocess, sys
from pathlib import Path
from launch.executors.local import HetLocalExecutor
from launch.executors.record import JobRecord, write_record
from pipeline.config import ClusterConfig, ComponentConfig
from tests.launch import tasks
from tests.launch.waiting import reports

run_dir = Path({str(tmp_path)!r})
(run_dir / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
job = HetLocalExecutor(run_dir, ClusterConfig(time_min=20), {{"train": ComponentConfig(nodes=2)}}).submit(
    tasks.report_and_wait, str(run_dir)
)
write_record(run_dir, JobRecord.of("local", job))
reports(run_dir, 2)
"""
    result = run(replace(python(program), run_dir=tmp_path), setting(tmp_path))
    assert result.outcome == FAILED  # it has printed no numbers
    assert not alive(int((tmp_path / "child").read_text()))
    assert not any(alive(rank["pid"]) for rank in reports(tmp_path, 2))


@pytest.mark.parametrize(
    ("body", "outcome", "note"),
    [
        pytest.param("def test_a(): pass", PASSED, "1 of 1 tests passed", marks=pytest.mark.full),
        ("def test_a(): pass\ndef test_b(): pytest.skip('few GPUs')", PASSED, "1 of 2 tests passed, 1 skipped"),
        pytest.param(
            "def test_b(): pytest.skip('few GPUs')", LEFT_OUT, "0 of 1 tests passed, 1 skipped", marks=pytest.mark.full
        ),
        ("def test_a(): pass\ndef test_b(): assert 0", FAILED, "1 of 2 tests passed"),
        pytest.param("import no_such_package", FAILED, "0 of 1 tests passed", marks=pytest.mark.full),
        pytest.param("", LEFT_OUT, "it has no test that needs a GPU", marks=pytest.mark.full),
    ],
)
def test_results_of_an_area_of_tests(tmp_path, body, outcome, note):
    """pytest's own report of a file of tests is read."""
    (tmp_path / "test_it.py").write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    paths = [str(tmp_path), f"--rootdir={tmp_path}", f"-c{tmp_path}/pytest.ini"]
    made = parts._tests("tests: x", (), paths, Setting("cuda", "tiny", tmp_path))
    result = run(made, setting(tmp_path))
    assert (result.outcome, result.note) == (outcome, note), result.log
    assert bool(result.log) == (outcome == FAILED)


def test_compiled_layers_are_measured_besides_eager_ones():
    """On a GPU; where the key is null, layers are compiled there."""
    recipes = {name: config.load("tiny_sft", list(keys)) for name, keys in parts.STEPS.items() if "FSDP2" in name}
    asked = {name: recipe.policy.dtensor_cfg.compile for name, recipe in recipes.items()}
    assert asked == {"FSDP2": None, "FSDP2, eager": False}


def test_every_test_that_needs_a_gpu_is_in_an_area():
    files = {ROOT / path for _, *paths in parts.AREAS.values() for path in paths}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert files == marked - {Path(__file__)}


@pytest.mark.parametrize(
    ("given", "ready", "gpus", "chosen"),
    [
        ("", True, ".venv python3", ".venv"),
        ("", True, "python3", "python3"),
        ("", True, ".venv", ".venv"),
        ("", True, "", ".venv"),
        ("", False, ".venv python3", "python3"),
        ("command line", True, ".venv python3", "python3"),
        ("environment", True, ".venv python3", "python3"),
    ],
)
def test_make_chooses_a_python_that_finds_a_gpu(tmp_path, given, ready, gpus, chosen):
    """gpus: the Pythons whose torch finds a GPU. Programs that print their name stand in for them."""
    for name, path in ((".venv", tmp_path / ".venv/bin/python"), ("python3", tmp_path / "python3")):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = int(name not in gpus.split())
        path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {found}; fi\necho {name} "$@"\n')
        path.chmod(0o755)
    if ready:
        (tmp_path / ".venv/ready").touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    if given == "environment":
        environment["PYTHON"] = "python3"
    command = ["make", "-s", "-f", ROOT / "Makefile", "gpu-check", *(["PYTHON=python3"] if given == "command line" else [])]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == [chosen, "-m", "tests.gpu_check"], answer.stderr


def test_the_table():
    machine = {"gpus": ["H100", "H100"], "cuda": "13.0", "versions": {"torch": "2.13.0", "vllm": None}}
    results = [
        Result("train: FSDP2", PASSED, "n", {"tokens/s": 12345.678, "MFU": None}, 12.3),
        Result("decode: vllm", LEFT_OUT, "not installed: vllm"),
        Result("refit: planned", FAILED, "it ended with status 1"),
    ]
    assert table.text(machine, results).splitlines() == [
        "",
        "2 H100; CUDA 13.0; torch 2.13.0, vllm none",
        "",
        "part                       s",
        "train: FSDP2    passed    12  tokens/s 1.235e+04; n",
        "decode: vllm    left out   0  not installed: vllm",
        "refit: planned  failed     0  it ended with status 1",
        "",
        "1 passed, 1 failed, 1 left out",
    ]


@pytest.mark.full
@pytest.mark.timeout(1300)
def test_the_whole_check_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "tests.gpu_check", "device=cpu", "size=tiny", f"out={tmp_path}/found.json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert answer.returncode == 0, answer.stdout[-5000:]
    found = {result["part"]: result for result in json.loads((tmp_path / "found.json").read_text())["results"]}
    outcomes = {name: result["outcome"] for name, result in found.items()}
    tests = [name for name in outcomes if name.startswith("tests: ")]
    assert {outcomes.pop(name) for name in tests} == {LEFT_OUT} and len(tests) == len(parts.AREAS)
    trained = {f"train: {name}" for name in ("FSDP2", "FSDP2, eager", "Megatron-Core")}
    measured = trained | {"decode: vllm", "decode: transformers", "refit: planned"}
    assert outcomes == dict.fromkeys({"run: tiny_sft", "run: tiny_grpo", *measured}, PASSED)
    for name in measured:
        numbers = found[name]["numbers"]
        assert all(value is None or value > 0 for value in numbers.values()) and {"tokens/s", "GB/s"} & numbers.keys()

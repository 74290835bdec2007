"""Command lines that nobody means, by `tests/launch/fuzz.py`."""

import subprocess
import sys

import pytest

from launch import submit, sweep
from launch.executors.base import ROOT
from tests.launch import fuzz
from tests.launch.model import write_recipe


def check(command: str, count: int, seed: int) -> None:
    bad = [outcome for outcome in fuzz.fuzz(command, count, seed) if outcome.bad]
    assert not bad, "\n\n".join(f"{each.case}\nstatus {each.status}\n{each.raised}{each.wrote}" for each in bad)


@pytest.mark.parametrize("command", fuzz.COMMANDS)
def test_some(command):
    check(command, 20 if command == "submit" else 4, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("command", fuzz.COMMANDS)
def test_many(command):
    check(command, 600 if command == "submit" else 100, seed=1)


@pytest.mark.full
def test_a_plan_of_thousands_of_ranks_is_within_the_bound():
    """500 generate nodes: 4,000 ranks in 2,000 engines."""
    many = ["recipe=qwen3_30ba3b_gspo", "dry_run=true", "cluster.generate.nodes=${grpo.max_val_samples}"]
    with fuzz.surroundings() as writes:
        outcome = fuzz.run(fuzz.Case("submit", many), writes)
    assert not outcome.bad, f"{outcome.seconds:.0f} s, {outcome.raised}"


def test_the_fuzzer_sees_what_is_wrong(monkeypatch):
    """A traceback, a status that no command has, and a file outside of its folder."""
    from pathlib import Path

    outside = ROOT / "fuzzed"

    def broken(arguments: list[str]) -> int:
        Path("inside").write_text("")
        if "show=true" in arguments:
            raise RuntimeError("show")
        if "plan=true" in arguments:
            return 3
        outside.write_text("")
        outside.unlink()
        return 0

    monkeypatch.setitem(fuzz.COMMANDS, "submit", (broken, fuzz.of_submit))
    found = list(fuzz.fuzz("submit", 20, seed=0))
    assert all(outcome.bad for outcome in found)
    assert {outcome.status for outcome in found} == {None, 3, 0}
    assert all("RuntimeError: show" in outcome.raised for outcome in found if outcome.status is None)
    assert all(str(outside) in outcome.wrote[0] for outcome in found if outcome.status == 0)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("==b", "'==b' on the command line: got the key ''; expected a dotted key"),
        ("a..b=1", "got the key 'a..b'; expected a dotted key"),
        ("grpo.seed=!!int a", "grpo.seed on the command line: not YAML"),
        ("grpo.seed=!!bool 2", "grpo.seed on the command line: not YAML"),
        (f"grpo.seed={'9' * 5000}", "grpo.seed on the command line: not YAML"),
        (f"grpo.seed={'[' * 60 + ']' * 60}", "grpo.seed on the command line: got a value that is nested more than 50 deep"),
        (f"grpo.seed={'[1,' * 20000}", "grpo.seed on the command line: got more than 1000 brackets"),
        (f"grpo.seed={'${' * 30}x{'}' * 30}", "got 30 interpolations in one value; expected 20 at most"),
        ("grpo.seed=${mul:'a',99999999999}", "got 'a'; expected a number"),
        ("grpo.seed=${oc.select:grpo}", "comes back to itself in a circle"),
        ("algorithm=2", "algorithm: got '2'; expected one of"),
        ("policy.generation.vllm_kwargs.kv_cache_memory_bytes=many", "kv_cache_memory_bytes: got 'many'; expected a number"),
    ],
)
def test_what_it_has_found_is_told(tmp_path, capsys, argument, says):
    recipe = write_recipe(tmp_path)
    assert submit.main([f"recipe={recipe}", "dry_run=true", argument]) == 2
    assert says in capsys.readouterr().err


def test_names_that_are_too_long_for_files_are_told(capsys):
    assert submit.main([f"recipe={'x' * 5000}", "show=true"]) == 2
    assert "no such recipe" in capsys.readouterr().err
    assert sweep.main([f"sweep={'x' * 5000}", "dry_run=true"]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_status_of_no_folder(tmp_path):
    command = [sys.executable, str(ROOT / "launch/status.py"), f"{tmp_path}/none", f"{tmp_path}/nor this"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr

"""Random command lines, by `tests/launch/fuzz.py`."""

import pytest

from launch import status
from launch.executors.executor import ROOT
from launch.submission import prepare
from pipeline.config import collected
from tests.launch import fuzz
from tests.launch.model import write_recipe
from tests.problems import named


def check(command: str, count: int, seed: int) -> None:
    bad = [outcome for outcome in fuzz.fuzz(command, count, seed) if outcome.bad]
    assert not bad, "\n\n".join(f"{each.case}\nstatus {each.status}\n{each.raised}{each.wrote}" for each in bad)


@pytest.mark.parametrize("command", fuzz.COMMANDS)
def test_a_few_cases(command):
    check(command, 6 if command == "submit" else 2, seed=0)


@pytest.mark.full
@pytest.mark.parametrize("command", fuzz.COMMANDS)
def test_many_cases(command):
    check(command, 600 if command == "submit" else 100, seed=1)


@pytest.mark.full
def test_a_plan_of_thousands_of_ranks_is_within_the_time_limit():
    """Plan 500 generate nodes: 4,000 ranks in 2,000 engines."""
    many = ["recipe=qwen3_30ba3b_gspo", "dry_run=true", "cluster.generate.nodes=${grpo.max_val_samples}"]
    with fuzz.surroundings() as writes:
        outcome = fuzz.run(fuzz.Case("submit", many), writes)
    assert not outcome.bad, f"{outcome.seconds:.0f} s, {outcome.raised}"


def test_the_fuzzer_finds_planted_faults(monkeypatch):
    """Plant a traceback, an unknown status, and a file outside the case's folder."""
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
    ("argument", "problem"),
    [
        ("==b", ("", "bad-format")),
        ("a..b=1", ("a..b", "bad-format")),
        ("grpo.seed=!!int a", ("grpo.seed", "bad-format")),
        ("grpo.seed=!!bool 2", ("grpo.seed", "bad-format")),
        (f"grpo.seed={'9' * 5000}", ("grpo.seed", "bad-format")),
        (f"grpo.seed={'[' * 60 + ']' * 60}", ("grpo.seed", "too-large")),
        (f"grpo.seed={'[1,' * 20000}", ("grpo.seed", "bad-format")),
        (f"grpo.seed={'${' * 30}x{'}' * 30}", ("grpo.seed", "bad-interpolation")),
        ("grpo.seed=${mul:'a',99999999999}", ("grpo.seed", "bad-interpolation")),
        ("grpo.seed=${oc.select:grpo}", ("grpo.seed", "circular")),
        ("algorithm=2", ("algorithm", "not-a-choice")),
        ("algorithm=[]", ("algorithm", "wrong-type")),
        (
            "policy.generation.vllm_kwargs.kv_cache_memory_bytes=many",
            ("policy.generation.vllm_kwargs.kv_cache_memory_bytes", "wrong-type"),
        ),
    ],
)
def test_earlier_findings_are_refused_with_a_message(tmp_path, argument, problem):
    with collected(found := []):
        found += prepare.examine(str(write_recipe(tmp_path)), [argument], dry=True).all_problems
    assert named(found) == {problem}


@pytest.mark.parametrize(("command", "key"), [("submit", "recipe"), ("sweep", "sweep"), ("status", "run"), ("export", "run")])
def test_names_too_long_for_files_are_refused(capsys, command, key):
    main, _ = fuzz.COMMANDS[command]
    assert main([f"{key}={'x' * 5000}"]) == 2
    assert "error: " in capsys.readouterr().err


def test_the_status_of_no_folder(tmp_path, capsys):
    assert status.main([f"{tmp_path}/none", f"{tmp_path}/nor this"]) == 2
    assert "error: " in capsys.readouterr().err

"""steer.py and what status, report and show tell of changes, over folders of runs as their jobs leave them."""

import json
import threading
import time
from pathlib import Path

import hetstep
import pytest

from launch import report, status, steer, submit
from launch.executors.record import JobRecord, write_record
from launch.runs.run_folder import RunFolder
from launch.submission import run_control
from pipeline import config
from pipeline.config.live_keys import value_at
from pipeline.files.storage import NO_RETRIES
from pipeline.steering import steer_files
from pipeline.steering.steer_files import ChangeAnswer, KeyChange
from tests.launch import made_runs
from tests.launch.api import conftest  # noqa: F401  # makes `hetstep` importable
from tests.launch.made_runs import Texts
from tests.launch.waiting import wait_until

LR = "policy.optimizer.kwargs.lr"
STEPS = "grpo.max_num_steps"
BACKEND = ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false")


@pytest.fixture
def run(tmp_path) -> Path:
    """Write a run that goes on, at step 6 of 100."""
    made = made_runs.folder(tmp_path / "one", "tiny_grpo", *BACKEND)
    write_record(made, JobRecord.of("local", made_runs.Alive()))
    made_runs.attempt(made, "7-0", made_runs.ago(600))
    made_runs.steps(made, 1, 6, Texts("2+5=", "7", "8", "9"))
    return made


def answer(run: Path, number: int, step: int, refused: str = "") -> None:
    """Answer a request as rank 0 does."""
    request, recipe = steer_files.read_request(run, number), config.read(run / "recipe.yaml")
    changes = tuple(KeyChange(key, value_at(recipe, key), new, value_at(recipe, key)) for key, new in request.values.items())
    found = ChangeAnswer(number, step, () if refused else changes, "ann", "n1", request.time, time.time(), refused)
    steer_files.write_answer(run, found, NO_RETRIES)


def later(run: Path, number: int, step: int, refused: str = "") -> threading.Thread:
    """Answer a request once it is there."""

    def work() -> None:
        wait_until(lambda: number in steer_files.numbers(run), "the request")
        answer(run, number, step, refused)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def called(capsys, *arguments: object) -> tuple[int, str, str]:
    code = steer.main([str(each) for each in arguments])
    return code, *capsys.readouterr()


def test_a_change_is_asked_and_its_step_printed(run, capsys):
    thread = later(run, 1, 7)
    code, out, _ = called(capsys, run, f"{LR}=1e-5", f"{STEPS}=50")
    thread.join()
    assert code == 0 and "change 1 took effect after step 7: from step 8 on" in out and f"{LR}: 0.0001 -> 1.0e-05" in out
    assert steer_files.read_request(run, 1).values == {LR: 1e-5, STEPS: 50}
    assert "max_num_steps: 100\n" in (run / "recipe.yaml").read_text()


def test_a_refusal_of_the_run_a_timeout_and_a_command_that_does_not_wait(run, capsys):
    thread = later(run, 1, 7, "policy.scheduler.kwargs: no such argument")
    code, _, err = called(capsys, run, f"{LR}=1e-5")
    thread.join()
    assert code == 2 and "no such argument" in err
    code, _, err = called(capsys, run, f"{LR}=1e-5", "timeout=0.1")
    assert code == 1 and "within 0.1 s (timeout)" in err and str(steer_files.path_of(run, 2)) in err
    code, out, _ = called(capsys, run, f"{STEPS}=50", "wait=false")
    assert code == 0 and "change 3 is requested" in out and steer_files.numbers(run) == [1, 2, 3]


def test_a_key_that_cannot_change_is_refused_before_anything_is_written(run, capsys):
    for arguments, code in (
        (["grpo.seed=3"], "not-live"),
        ([f"{LR}=fast"], "wrong-type"),
        (["policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {steps: 3}}"], "unknown-key"),
        (["grpo.stop_at_validation_metric=val/nothing", "grpo.stop_patience=2"], "not-a-choice"),
        ([], "missing-value"),
    ):
        exit_status, _, err = called(capsys, run, *arguments)
        assert exit_status == 2 and f"[{code}]" in err, err
    assert steer_files.numbers(run) == []


def test_what_is_asked_already_counts(run, capsys):
    """The second command alone would be refused: nothing stops the run without a metric."""
    called(capsys, run, "grpo.stop_at_validation_metric=val/reward", "grpo.stop_patience=2", "grpo.val_period=5", "wait=false")
    assert called(capsys, run, "grpo.stop_patience=4", "wait=false")[0] == 0
    answer(run, 1, 7)
    assert called(capsys, run, "grpo.stop_min_delta=0.1", "wait=false")[0] == 0


def test_a_run_that_does_not_go_on_is_refused(tmp_path, run, capsys):
    ended = made_runs.folder(tmp_path / "two", "tiny_grpo", *BACKEND)
    made_runs.attempt(ended, "1-0", made_runs.ago(60))
    code, _, err = called(capsys, ended, f"{LR}=1e-5")
    assert code == 2 and "is failed" in err and "[not-running]" in err
    made_runs.ended(run, 100)
    code, _, err = called(capsys, run, f"{LR}=1e-5")
    assert code == 2 and "is done" in err
    code, _, err = called(capsys, tmp_path / "none", f"{LR}=1e-5")
    assert code == 2 and "[file-not-found]" in err


def test_a_request_is_withdrawn_if_the_run_ends_before(run, capsys, monkeypatch):
    from launch.runs import steer_request

    monkeypatch.setattr(steer_request, "STATE_S", 0.0)

    def end() -> None:
        wait_until(lambda: steer_files.numbers(run), "the request")
        made_runs.ended(run, 6)

    thread = threading.Thread(target=end)
    thread.start()
    code, _, err = called(capsys, run, f"{LR}=1e-5")
    thread.join()
    assert code == 2 and "is done" in err and steer_files.numbers(run) == []


def test_the_python_api(run):
    found = hetstep.load(run)
    thread = later(run, 1, 8)
    assert found.steer({"policy.optimizer": {"kwargs": {"lr": 1e-5}}}, grpo__max_num_steps=9) == 8
    thread.join()
    assert found.steer(grpo__max_num_steps=10, wait=False) is None
    with pytest.raises(hetstep.NotEnded):
        found.steer(grpo__max_num_steps=11, timeout=0.1)
    with pytest.raises(hetstep.RecipeError) as error:
        found.steer(grpo__seed=3)
    assert error.value.codes == ("not-live",)


def test_status_report_and_show_tell_the_changes(run, tmp_path, capsys):
    called(capsys, run, f"{LR}=1e-5", f"{STEPS}=50", "wait=false")
    answer(run, 1, 3)
    called(capsys, run, f"{LR}=2e-5", "wait=false")
    status.main([str(run)])
    text = capsys.readouterr().out
    assert "6 of 50" in text and f"after step 3: {LR} 0.0001 -> 1.0e-05; by ann" in text and f"asked: {LR} -> 2.0e-05" in text
    status.main([str(run), "json=true"])
    (first, _) = json.loads(capsys.readouterr().out)["changes"]
    assert (first["step"], first["key"], first["old"], first["new"], first["host"]) == (3, LR, 0.0001, 1e-5, "n1")
    page = tmp_path / "page.html"
    report.main([str(run), f"out={page}"])
    content = page.read_text()
    assert "Changes while it ran" in content and f'"{LR}: 0.0001 -\\u0026gt; 1.0e-05"' in content  # a row, and a flag
    capsys.readouterr()
    submit.main(["recipe=tiny_grpo", f"run_dir={run}", "show=true"])
    assert f"after step 3: {LR}: 0.0001 -> 1.0e-05 (by ann on n1)" in capsys.readouterr().out


def test_a_run_that_a_change_has_ended_is_complete_for_its_own_recipe(run):
    steer_files.ask(run, {STEPS: 6})
    answer(run, 1, 5)
    made_runs.ended(run, 6)
    recipe = config.read(run / "recipe.yaml")
    assert "launch/steer.py set grpo.max_num_steps to 6" in (run_control.completion_message(recipe, run) or "")
    recipe.grpo.max_num_steps = 20
    assert RunFolder.at(run).changed_values == {STEPS: 6}
    assert "launch/steer.py" not in (run_control.completion_message(recipe, run) or "")

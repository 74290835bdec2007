"""The Python API without ranks of the pipeline: keys, errors, plans, folders as runs leave them, the end of a job."""

import inspect
import json
import math
from pathlib import Path

import hetstep
import pytest

from launch.executors.local import HetLocalExecutor
from launch.executors.record import JobRecord, write_record
from launch.executors.slurm import HetSlurmExecutor
from launch.runs.attempts import STOP, latest
from launch.runs.run_folder import RunFolder
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig, ClusterConfig, ComponentConfig, RequeueConfig
from tests.launch import made_runs, tasks
from tests.launch.api import program
from tests.launch.waiting import reports

TEXTS = made_runs.Texts("2+5=", "7", "8", "9")
COMPONENTS = {"train": ComponentConfig(cpus_per_task=1), "generate": ComponentConfig(cpus_per_task=1)}


# ---- the package --------------------------------------------------------------------------------------------------------


def test_a_program_without_torch_is_left_as_it_was_and_has_no_plan(tmp_path):
    """Nothing is printed, no signal is handled, and the working directory and the environment stay."""
    done = program.run(
        """
import os, signal
before = [signal.getsignal(number) for number in signal.valid_signals()], os.getcwd(), dict(os.environ)
import hetstep
try:
    hetstep.plan("tiny_sft", {"cluster": {"executor": "local"}}, run_dir="runs/x")
except hetstep.RecipeError as error:
    assert error.codes == ("not-installed",) and "torch and transformers" in str(error), error
else:
    raise AssertionError("a plan without torch")
try:
    hetstep.submit("tiny_sft", {"sft": {"max_num_stepz": 3}}, policy__precision="float99")
except hetstep.RecipeError as error:
    assert error.codes == ("unknown-key", "not-a-choice"), error.codes
assert before == ([signal.getsignal(number) for number in signal.valid_signals()], os.getcwd(), dict(os.environ))
assert not os.listdir(), os.listdir()
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_everything_public_is_documented():
    assert "submit" in hetstep.__all__
    for name in hetstep.__all__:
        public = getattr(hetstep, name)
        assert inspect.getdoc(public), name
        for member, value in vars(public).items() if inspect.isclass(public) else ():
            if callable(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


# ---- keys and errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "keywords"),
    [
        ({"grpo.max_num_steps": 3, "env.addition.kwargs.pattern": "[a=b], ${x}"}, {}),
        ({"grpo": {"max_num_steps": 3}, "env.addition": {"kwargs": {"pattern": "[a=b], ${x}"}}}, {}),
        (None, {"grpo__max_num_steps": 3, "env": {"addition": {"kwargs.pattern": "[a=b], ${x}"}}}),
        ({"grpo.max_num_steps": 4, "env.addition.kwargs.pattern": "[a=b], ${x}"}, {"grpo__max_num_steps": 3}),
    ],
)
def test_keys_are_given_dotted_nested_or_as_keywords(overrides, keywords):
    if overrides is None or "${x}" in str(overrides):
        # As in a recipe's file, `$` begins a reference, which a backslash turns off.
        overrides = json.loads(json.dumps(overrides or {}).replace("${x}", "\\\\${x}"))
        keywords = json.loads(json.dumps(keywords).replace("${x}", "\\\\${x}"))
    made = hetstep.recipe("tiny_grpo", overrides, **keywords)
    assert made.grpo.max_num_steps == 3
    assert made.env["addition"].kwargs["pattern"] == "[a=b], ${x}"


def test_values_of_python_are_those_of_a_recipe(tmp_path):
    import numpy as np

    made = hetstep.recipe(
        Path("tiny_sft"),
        {"policy.optimizer.kwargs.lr": np.float64(3e-5), "checkpointing.keep_top_k": None, "data.train.kwargs.digits": (1, 2)},
        run_dir=tmp_path / "run",
        sft__max_num_steps=np.int64(7),
        policy__generation__stop_strings=["null", "1e-6", "a, b"],
    )
    assert made.run_dir == str(tmp_path / "run") and made.sft.max_num_steps == 7 and made.checkpointing.keep_top_k is None
    assert made.policy.optimizer.kwargs["lr"] == 3e-5 and made.data.train.kwargs["digits"] == [1, 2]
    assert made.policy.generation.stop_strings == ["null", "1e-6", "a, b"]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [({"sft.seed": object()}, "wrong-type"), ({1: 2}, "bad-format"), ({"sft.seed=1": 2}, "bad-format"), ([1], "wrong-type")],
)
def test_values_that_no_recipe_holds_are_refused(overrides, code):
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.recipe("tiny_sft", overrides)
    assert error.value.codes == (code,)


def test_a_problem_names_the_argument_of_the_call():
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.recipe("tiny_sft", {"sft": {"max_num_stepz": 3}}, policy__precision="float99")
    assert [each.origin for each in error.value.problems] == ["the argument overrides", "the argument policy__precision"]
    assert str(error.value).startswith("the argument overrides: sft.max_num_stepz: ")
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.sweep("tiny", no_such__key=1)
    assert [each.origin for each in error.value.problems] == ["the argument no_such__key"]


def test_all_errors_are_of_one_family(tmp_path):
    for call in (
        lambda: hetstep.recipe("tiny_sfd"),
        lambda: hetstep.load(tmp_path),
        lambda: hetstep.evaluate("tiny"),
        lambda: hetstep.evaluate("tiny", model=tmp_path, step=3),
        lambda: hetstep.sweep("nightlyy"),
        lambda: hetstep.sweep("tiny", id="../x"),
    ):
        with pytest.raises(hetstep.HetstepError) as error:
            call()
        assert error.value.problems and all(error.value.codes)
    assert issubclass(hetstep.NotEnded, TimeoutError) and issubclass(hetstep.RecipeError, ValueError)


def test_inside_a_batch_job_of_hetstep_nothing_is_submitted(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("HETSTEP_SBATCH", "7")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.submit("tiny_sft")
    assert error.value.codes == ("unsupported",)


# ---- a plan -------------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_plan_are_those_of_its_text():
    plan = hetstep.plan("llama8b_grpo")
    assert plan.fits and plan.gpus > 0 and plan.steps and plan.step_seconds and plan.gpu_hours and plan.refit_seconds
    assert plan.gpu_hours == pytest.approx(plan.gpus * plan.total_seconds / 3600)
    assert f"{plan.gpu_hours:,.0f} GPU-hours on {plan.gpus} GPUs" in str(plan)
    assert set(plan.train_bytes) > {"weights", "gradients", "optimizer"} and plan.kv_cache_tokens > 0
    assert not plan.problems and "verdict" in str(plan)


def test_a_plan_that_does_not_fit_is_returned_with_its_problems():
    plan = hetstep.plan("llama70b_grpo", cluster__train__gpu_memory_gb=8)
    assert not plan.fits and {problem.code for problem in plan.problems} == {"out-of-memory"}


# ---- a run's folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> hetstep.Run:
    """Return a run of six steps whose job was killed, with a checkpoint of step 4."""
    folder = made_runs.folder(tmp_path / "run")
    made_runs.attempt(folder, "1-0", made_runs.ago(600))
    made_runs.steps(folder, 1, 6, TEXTS)
    checkpoints = Checkpoints(folder, "1-0", CheckpointingConfig())
    checkpoints.commit(checkpoints.begin(4), 4, None, {})
    return hetstep.load(folder)


def test_what_a_run_has_written(run):
    records = run.metrics()
    assert [each["step"] for each in records] == [1, 2, 3, 4, 5, 6]
    series = run.metrics("train/grad_norm")
    assert math.isnan(series.pop(3)) and series == dict.fromkeys([1, 2, 4, 5, 6], 1.0)
    assert list(run.metrics("val/reward")) == [2, 4, 6] and run.metrics("no/such") == {}
    assert len(run.rollouts(3)) == 12 and run.rollouts() == run.rollouts(6)
    assert {"prompt", "completion", "reward"} <= set(run.rollouts(2, validation=True)[0])
    assert run.checkpoint().step == run.checkpoint(4).step == 4 and run.recipe.algorithm == "grpo"
    for call in (lambda: run.rollouts(9), lambda: run.checkpoint(9), lambda: run.export(9)):
        with pytest.raises(hetstep.RecipeError):
            call()


def test_the_status_of_a_run_that_failed(run, capsys):
    found = run.status()
    assert (found.state, found.ended, found.step, found.max_steps, found.checkpoint) == ("failed", True, 6, 100, 4)
    assert found.metrics["train/reward"] == run.metrics("train/reward")[6]
    assert "state       failed" in str(found)
    with pytest.raises(hetstep.RunFailed) as error:
        run.wait()
    assert error.value.codes == ("run-failed",) and error.value.folder == run.folder
    assert run.cancel().state == run.stop_and_save().state == "failed"  # it has ended: nothing to do
    assert capsys.readouterr() == ("", "")


def test_a_report(run, tmp_path, capsys):
    assert run.report(tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "plotly.min.js").exists() and capsys.readouterr() == ("", "")


# ---- the end of a job ---------------------------------------------------------------------------------------------------


def submitted(folder: Path, task, executor: str = "local") -> hetstep.Run:
    """Submit a stand-in for the pipeline as a run, whose crashes would be restarted."""
    made_runs.folder(folder)
    (folder / "job.json").unlink()
    cluster = ClusterConfig(time_min=5, requeue=RequeueConfig())
    if executor == "local":
        job = HetLocalExecutor(folder, cluster, COMPONENTS).submit(task, str(folder))
    else:
        job = HetSlurmExecutor(folder, "stand_in", cluster, COMPONENTS).submit(task, str(folder))
    write_record(folder, JobRecord.of(executor, job))
    return hetstep.load(folder)


def check_stop_and_save(run: hetstep.Run) -> None:
    reports(run.folder, 2)
    with pytest.raises(hetstep.NotEnded):
        run.wait(0)
    with pytest.raises(hetstep.NotEnded):
        run.stop_and_save(timeout=0)  # the request stays, and a second one changes nothing
    found = run.stop_and_save()
    assert (found.state, found.why) == ("stopped", "saved and stopped, as asked"), found
    (attempt,) = RunFolder.at(run.folder).attempts  # not started again
    assert attempt.progress == 7 and attempt.requeue_reason == "SIGUSR2 came"
    assert run.wait().state == "stopped"


@pytest.mark.full
def test_a_request_to_stop_that_was_interrupted_is_made_again(tmp_path):
    run = submitted(tmp_path / "run", tasks.save_on_request)
    reports(run.folder, 2)
    found = latest(run.folder)
    assert found
    (found.folder / STOP).write_text("")  # and no signal
    assert run.stop_and_save(60).state == "stopped"


def test_stop_and_save(tmp_path):
    check_stop_and_save(submitted(tmp_path / "run", tasks.save_on_request))


@pytest.mark.slurm
@pytest.mark.full
def test_stop_and_save_under_slurm(tmp_path, slurm_cluster, monkeypatch):
    slurm_cluster.enter(monkeypatch)
    check_stop_and_save(submitted(tmp_path / "run", tasks.save_on_request, "slurm"))

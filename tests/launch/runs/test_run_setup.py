"""Which submissions may write into a run folder."""

import errno
import fcntl
import json
import os
import shlex
from pathlib import Path

import pytest

from launch.executors.components import components
from launch.executors.executor import ROOT
from launch.executors.record import JobRecord, write_record
from launch.runs import run_setup
from launch.runs.run_setup import lock_run
from launch.submission import run_control
from launch.sweeps.sweep_folder import SweepFolder
from pipeline import config
from pipeline.config import RecipeError
from tests.launch.model import write_recipe
from tests.problems import refused


@pytest.fixture
def load(tmp_path):
    path = write_recipe(tmp_path)
    return lambda *overrides: config.load(str(path), list(overrides))


@pytest.mark.parametrize(
    "override",
    [
        "run_dir=elsewhere",
        "needs=[tiny_sft]",
        "cluster.train.nodes=2",
        "cluster.timeouts.join=5",
        "logger.num_rollouts_to_log=1",
        "checkpointing.save_period=7",
        "checkpointing.keep_top_k=null",
        "grpo.max_num_steps=99",
        "grpo.max_num_epochs=2",
        "grpo.max_val_samples=2",
        "policy.generation.val_temperature=0.5",
        "policy.generation.val_top_p=0.9",
        "policy.generation.val_top_k=20",
        "policy.dtensor_cfg.tensor_parallel_size=2",
        "policy.dtensor_cfg.activation_checkpointing=true",
        "policy.dtensor_cfg.cpu_offload=true",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.megatron_cfg.num_layers_in_first_pipeline_stage=2",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage=2",
        "policy.megatron_cfg.context_parallel_size=2",
        "policy.megatron_cfg.expert_model_parallel_size=2",
        "policy.megatron_cfg.expert_tensor_parallel_size=2",
        "policy.megatron_cfg.sequence_parallel=true",
        "policy.megatron_cfg.activation_checkpointing=true",
        "policy.megatron_cfg.recompute_granularity=selective",
        "policy.megatron_cfg.recompute_num_layers=2",
    ],
)
def test_keys_that_a_resumed_run_may_change(load, override):
    assert config.to_yaml(load()) != config.to_yaml(load(override))
    assert not run_setup.differences(load(), load(override))


STOPS = (
    "grpo.val_period=1",
    "data.validation={data_path: data.jsonl, env_name: math}",
    "grpo.stop_at_validation_metric=val/accuracy",
    "grpo.stop_at_validation_threshold=0.5",
    "grpo.stop_patience=2",
)


def test_a_run_that_stopped_early_continues_with_another_rule(load, tmp_path):
    (tmp_path / "run").mkdir()
    before = load(*STOPS)
    run_setup.prepare(before, tmp_path / "run", "")
    (tmp_path / "run/done.json").write_text('{"step": 1, "early_stop": "val/accuracy reached 0.6"}')
    assert "step 1: val/accuracy reached 0.6; change grpo.stop_" in (
        run_control.completion_message(before, tmp_path / "run") or ""
    )
    assert "val/accuracy reached 0.6" in (
        run_control.completion_message(load(*STOPS, "grpo.max_num_steps=9"), tmp_path / "run") or ""
    )
    for rule in (
        "grpo.stop_at_validation_metric=val/reward",
        "grpo.stop_at_validation_threshold=0.9",
        "grpo.stop_patience=3",
        "grpo.stop_min_delta=0.1",
    ):
        now = load(*STOPS, rule)
        assert not run_setup.differences(before, now) and run_control.completion_message(now, tmp_path / "run") is None


def test_a_run_may_be_moved(tmp_path):
    (tmp_path / "old").mkdir()
    path = write_recipe(tmp_path / "old", run_dir=str(tmp_path / "old/runs/a"))
    before = config.load(str(path))
    (tmp_path / "old").rename(tmp_path / "new")
    path = write_recipe(tmp_path / "new", run_dir=str(tmp_path / "new/runs/a"))
    now = config.load(str(path))
    assert before.policy.model_name != now.policy.model_name
    assert not run_setup.differences(before, now)
    assert "policy.model_name" in run_setup.differences(before, config.load(str(path), [f"run_dir={tmp_path}/a"]))


def test_an_evaluation_does_not_complete_training(load, tmp_path):
    run_dir, done = tmp_path / "run", tmp_path / "run/done.json"
    run_dir.mkdir()
    trained, evaluated = load(), load("grpo.max_num_steps=0", "data.validation={data_path: data.jsonl, env_name: math}")

    def ended(recipe, record):
        run_setup.prepare(recipe, run_dir, "")
        assert not run_setup.ended_well(run_dir)
        done.write_text(json.dumps(record))
        assert run_setup.ended_well(run_dir)
        return run_setup.done_step(run_dir)

    assert ended(evaluated, {"step": 0, "evaluation": True}) is None
    assert ended(trained, {"step": 3}) == 3
    assert ended(evaluated, {"step": 3, "evaluation": True}) == 3
    assert ended(evaluated, {"step": 3, "evaluation": True}) == 3
    run_setup.prepare(trained, run_dir, "")
    assert run_setup.done_step(run_dir) is None


def test_a_run_without_a_checkpoint_is_not_evaluated(load, tmp_path):
    evaluated = load("grpo.max_num_steps=0", "data.validation={data_path: data.jsonl, env_name: math}")
    run_setup.check(evaluated)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "time": 1, "val/reward": 1}\n')
    run_setup.check(evaluated)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "time": 1, "train/loss": 1}\n')
    with refused(("run_dir", "no-checkpoint")):
        run_setup.check(evaluated)


@pytest.mark.parametrize("key", ["enabled=true", "freeze_moe_router=false", "moe_router_dtype=fp32", "optimizer.lr=1"])
def test_megatron_keys_that_change_results_are_differences(load, key):
    name = f"policy.megatron_cfg.{key.partition('=')[0]}"
    assert any(
        f"{name}.".startswith(f"{other}.") for other in run_setup.differences(load(), load(f"policy.megatron_cfg.{key}"))
    )


@pytest.mark.parametrize("name", ["train", "generate"])
def test_a_users_python_path_keeps_hetstep(load, name):
    """Ranks start with python -P, which ignores the working directory."""
    given = f"cluster.{name}.env_vars.PYTHONPATH"
    parts = components(load(f"{given}=/mine:/other"))
    assert parts[name].env_vars == {"PYTHONPATH": f"{ROOT}:/mine:/other"}
    assert components(load(f"{given}=''"))[name].env_vars == {"PYTHONPATH": str(ROOT)}


def test_keys_that_must_stay_are_named_in_the_schemas_order_with_the_reason(load, tmp_path):
    before = load("policy.tokenizer.chat_template=a b")
    ahead = ["grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"]
    now = load("grpo.seed=1", "policy.optimizer.kwargs.betas=[0.9,0.95]", "grpo.max_num_steps=99", *ahead)
    found = run_setup.differences(before, now)
    texts, betas = "policy.tokenizer.chat_template", "policy.optimizer.kwargs.betas"
    assert sorted(found) == sorted(["grpo.seed", texts, betas, *(key.removesuffix("=true") for key in ahead)])
    assert next(iter(found)) == "grpo.seed" and found["grpo.seed"] == (42, 1) and found[betas] == (None, [0.9, 0.95])
    (tmp_path / "run").mkdir()
    config.write(config.with_backend(before, "dtensor"), tmp_path / "run/recipe.yaml")
    run_setup.check(config.with_backend(now, "dtensor"))  # the run left nothing to continue
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "time": 0}\n')
    run_setup.check(config.with_backend(now, "dtensor"))
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "time": 0}\n{"step": 1, "time": 1}\n')
    with refused(("run_dir", "run-exists")) as error:
        run_setup.check(config.with_backend(now, "dtensor"))
    (problem,) = error.value.problems
    lines = [line.strip() for line in str(problem).splitlines()]
    assert lines[1:3] == [
        "grpo.seed is 42 in the run and 1 in this recipe",
        "grpo.async_grpo.enabled is False in the run and True in this recipe",
    ]
    assert f"{betas} is absent in the run and [0.9, 0.95] in this recipe" in lines
    kept, left_out = lines[-2], lines[-1].removeprefix("without ")
    assert left_out == betas
    assert sorted(shlex.split(kept)) == sorted(
        ["grpo.seed=42", f"{texts}=a b", *(key.replace("true", "false") for key in ahead)]
    )
    again = load("grpo.seed=1", *ahead, *shlex.split(kept))
    run_setup.check(config.with_backend(again, "dtensor"))


@pytest.mark.parametrize("left", ["checkpoints/step_000004/complete.json", "answers/sums.jsonl", "done.json", "job.json"])
def test_a_run_that_left_something_or_goes_on_is_not_replaced(load, tmp_path, monkeypatch, left):
    config.write(config.with_backend(load(), "dtensor"), run_file(tmp_path, "recipe.yaml"))
    run_file(tmp_path, left).write_text("{}")
    monkeypatch.setattr(run_setup, "live_job", lambda folder: (folder / "job.json").exists())
    with refused(("run_dir", "run-exists")):
        run_setup.check(config.with_backend(load("grpo.seed=1"), "dtensor"))


def run_file(folder: Path, name: str) -> Path:
    path = folder / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_submission(load, tmp_path):
    """The checkpoint is of an earlier version, whose schedules counted updates; see tests/test_checkpoint.py."""
    folder = tmp_path / "run/checkpoints/step_000004"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text(json.dumps({"step": 4, "metric": None, "state": {}, "files": {}}))
    warm_up = "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 5}}"
    run_setup.check(load(warm_up))  # 2 prompts, 2 answers each, 4 samples in an update
    with refused(("run_dir", "wrong-version")):
        run_setup.check(load(warm_up, "policy.train_global_batch_size=2"))


def test_a_folder_is_locked_during_submission(tmp_path):
    with run_setup.lock_run(tmp_path), refused(("run_dir", "in-use")), run_setup.lock_run(tmp_path):  # a lock is its opener's
        pass
    with run_setup.lock_run(tmp_path):
        pass


@pytest.mark.parametrize(
    "record", [JobRecord("local", "1", "another-host", start_time=1), JobRecord("slurm", "17", "login", cluster="a")]
)
def test_a_job_that_cannot_be_queried_is_refused(tmp_path, monkeypatch, record):
    monkeypatch.setenv("PATH", str(tmp_path))
    write_record(tmp_path, record)
    with refused(("run_dir", "unreachable")), run_setup.lock_run(tmp_path):
        pass


def test_a_slurm_job_of_another_cluster_cannot_be_queried(tmp_path, monkeypatch):
    """An id that this cluster does not have is not taken for a finished job."""
    known = "ping) echo 'Slurmctld(primary) at x is UP';; show\\ config) echo ClusterName = b"
    scontrol = f'case "$1${{2:+ $2}}" in {known};; *) echo Invalid job id >&2; exit 1; esac'
    answers = {"scontrol": scontrol, "sacct": ":"}
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_record(run_dir, JobRecord("slurm", "17", "login", cluster="a"))
    with refused(("run_dir", "unreachable")), lock_run(run_dir):
        pass
    for here in ("b", None):  # None: of an older version
        write_record(run_dir, JobRecord("slurm", "17", "login", cluster=here))
        with lock_run(run_dir):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
@pytest.mark.parametrize("hold", [lock_run, lambda path: SweepFolder(path).locked()], ids=["run", "sweep"])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, hold, number):
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RecipeError) as error, hold(tmp_path):
        pass
    assert error.value.problems[0].code == "no-locks" and os.strerror(number) in str(error.value)


def test_an_earlier_attempts_end_files_are_removed(tmp_path, load):
    (tmp_path / "done.json").write_text("{}")
    run_setup.prepare(load(), tmp_path, "#!/bin/bash\n")
    assert run_setup.done_step(tmp_path) is None
    assert not run_setup.differences(config.read(tmp_path / "recipe.yaml"), load())

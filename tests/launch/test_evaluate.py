"""launch/evaluate.py without jobs: the recipe of an evaluation, its problems, kept checkpoints, the follower, what is shown."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from launch import evaluate, status, submit
from launch.evaluations import evaluation_job, follower
from launch.evaluations.follower import CheckpointFollower
from launch.executors.components import components
from launch.executors.executor import JobStatus
from launch.executors.record import JobRecord
from launch.plan import evaluation as evaluation_plan
from launch.runs import evaluated_checkpoints, evaluation_sources, follower_process, score_tables, suites, waiting_checkpoints
from launch.runs.follower_process import FollowRequest
from launch.runs.run_state import RunState
from pipeline import config
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import RECIPES, CheckpointingConfig, RecipeError
from pipeline.evaluation import task_data as evaluation_data
from tests.launch import made_runs

MODEL = str(RECIPES / "tiny")
OF_RUN = (f"policy.model_name={MODEL}", "policy.random_init=true", "needs=[]", "cluster.executor=local")


@pytest.fixture(autouse=True)
def signals():
    """Restore what the command does at SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A run of tiny_grpo with checkpoints of steps 50 and 100."""
    monkeypatch.chdir(tmp_path)
    folder = made_runs.folder(tmp_path / "runs/a", "tiny_grpo", *OF_RUN, "cluster.generate.ranks_per_node=3")
    for step in (50, 100):
        save(folder, step)
    return folder


def save(run: Path, step: int, keep: int | None = None) -> Path:
    checkpoints = Checkpoints(run, "x", CheckpointingConfig(keep_top_k=keep))
    partial = checkpoints.begin(step)
    (partial / "train").mkdir()
    (partial / "train/weights").write_bytes(b"w" * step)
    return checkpoints.commit(partial, step, None, {}).folder


def codes(error: RecipeError) -> set[tuple[str, str]]:
    return {(problem.key, problem.code) for problem in error.problems}


def printed_problems(capsys, *arguments: str) -> str:
    assert evaluate.main([*arguments]) == 2
    return capsys.readouterr().err


# ---- the recipe -----------------------------------------------------------------------------------------------------------


def test_a_job_has_generate_ranks_alone(run, capsys):
    source = evaluation_sources.of_checkpoint(
        run, evaluation_sources.read_run(run), evaluation_sources.select(run, "tiny", 50), "tiny"
    )
    recipe = suites.inspect("tiny", source, ()).recipe
    assert list(config.components(recipe)) == list(components(recipe)) == ["generate"]
    assert evaluate.main([f"run={run}", "suite=tiny", "step=50", "dry_run=true", "cluster.executor=slurm"]) == 0
    out = capsys.readouterr().out
    assert "HETSTEP_COMPONENT=generate" in out and "HETSTEP_COMPONENT=train" not in out and "HETSTEP_WORLD_SIZE=3" in out
    assert "cannot be submitted yet" not in out and not (run / "evaluations").exists()


def test_an_evaluation_takes_policy_cluster_and_checkpoint_of_its_run(run):
    found = evaluation_sources.select(run, "tiny", None)
    source = evaluation_sources.of_checkpoint(run, evaluation_sources.read_run(run), found, "tiny")
    recipe = suites.inspect(
        "tiny", source, ["cluster.time_min=7"], {"cluster": {"time_min": 8, "generate": {"nodes": 2}}}
    ).recipe
    assert recipe.run_dir == str(run / "evaluations/tiny/step_000100") and recipe.name == "tiny"
    assert recipe.policy.model_name == MODEL and recipe.policy.generation.max_num_seqs == 64
    assert recipe.cluster.generate.ranks_per_node == 3 and recipe.cluster.generate.nodes == 2  # the command line wins
    assert recipe.cluster.time_min == 7 and recipe.cluster.executor == "local"
    assert recipe.evaluate.step == 100 and recipe.evaluate.run == str(run)
    assert recipe.evaluate.checkpoint == str(waiting_checkpoints.checkpoint_folder(Path(recipe.run_dir)))


def test_an_offline_run_gives_its_train_components_shape(tmp_path):
    folder = made_runs.folder(tmp_path / "b", "tiny_sft", "cluster.executor=local")
    values = evaluation_sources.of_future(evaluation_sources.read_run(folder), "tiny").values
    assert values["cluster"]["generate"]["ranks_per_node"] == 2 and "generation" not in values["policy"]


@pytest.mark.parametrize(
    ("name", "folder"),
    [("Qwen/Qwen3-4B", "Qwen--Qwen3-4B"), (MODEL, "tiny")],
)
def test_an_evaluation_of_a_model_has_a_folder_of_the_models_name(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert evaluation_sources.of_model(name, "math").run_dir == tmp_path / "runs/evaluations/math" / folder


def test_tasks_of_the_harness_are_a_suite():
    name, path, tasks = suites.find("lm_eval:mmlu,hellaswag")
    assert (name, path.stem, tasks) == ("lm_eval_mmlu_hellaswag", "lm_eval", ["mmlu", "hellaswag"])
    assert suites.find("lm_eval:mmlu_*,a/b")[0] == suites.name_of("lm_eval:mmlu_*,a/b") == "lm_eval_mmlu__a_b"
    with pytest.raises(RecipeError):
        suites.find("lm_eval:")


@pytest.mark.parametrize("path", sorted(suites.SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_suite_is_a_recipe_without_problems(path):
    """But for what a user must give: a judge, and tasks of lm-evaluation-harness."""
    loaded = suites.inspect(path.stem, evaluation_sources.of_model(MODEL, path.stem), ())
    given = {"evaluate.judge.model_name", *(["evaluate.tasks"] if path.stem == suites.HARNESS else [])}
    assert {problem.key for problem in loaded.problems} <= given


# ---- problems -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["suite=tiyn", "model=x"], "did you mean 'tiny'?", "file-not-found"),
        (["suite=tiny", "model=none/such"], "policy.model_name: ", "unavailable-model"),
        (["suite=tiny", f"model={MODEL}"], "has no weights", "file-not-found"),
        (["suite=tiny"], "expected run=RUN_DIR or model=", "missing-value"),
        (["suite=tiny", "run=x", "model=y"], "got run and model", "contradiction"),
        (["suite=tiny", "model=x", "step=3"], "got a step without a run", "has-no-effect"),
        (["suite=tiny", "run=x", "step=last"], "a step, all or follow", "wrong-type"),
        (["suite=tiny", "run=x", "step=follow", "plan=true"], "got follow with plan=true", "contradiction"),
        (["suite=tiny", "run=gone"], "there is no such folder", "file-not-found"),
        (["suite=tiny", "model=x", "compare=y", "dry_run=true"], "got dry_run=true too", "contradiction"),
        ([f"suite={RECIPES / 'tiny_sft.yaml'}", f"model={MODEL}"], "expected a suite", "not-a-choice"),
    ],
)
def test_problems_of_the_command(arguments, message, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = printed_problems(capsys, *arguments)
    assert message in found and f"[{code}]" in found


def test_problems_of_a_checkpoint(run, capsys):
    assert "a complete checkpoint: 50, 100" in printed_problems(capsys, f"run={run}", "suite=tiny", "step=60")
    other = ("policy.hf_config_overrides={rope_theta: 3.0}", "dry_run=true")
    assert "policy.hf_config_overrides: got " in printed_problems(capsys, f"run={run}", "suite=tiny", *other)
    gone = printed_problems(capsys, f"run={run}", "suite=tiny", "evaluate.checkpoint=x", "evaluate.step=7", "dry_run=true")
    assert "evaluate.checkpoint: " in gone and "[no-checkpoint]" in gone
    assert "/x; expected " in printed_problems(capsys, f"run={run}", "suite=tiny", "run_dir=x", "dry_run=true")
    shutil.rmtree(run / "checkpoints")
    assert "no complete checkpoint yet" in printed_problems(capsys, f"run={run}", "suite=tiny")
    assert "got no suite" in printed_problems(capsys, f"run={run}")


@pytest.mark.parametrize(
    ("key", "code"),
    [
        ("cluster.share_nodes=true", "has-no-effect"),
        ("policy.generation.colocated.enabled=true", "has-no-effect"),
        ("env.addition={_override_: true, kind: reward_model, model_name: x}", "unsupported"),
    ],
)
def test_keys_that_need_train_ranks_are_refused(run, capsys, key, code):
    assert f"[{code}]" in printed_problems(capsys, f"run={run}", "suite=tiny", key, "dry_run=true")


# ---- kept checkpoints -----------------------------------------------------------------------------------------------------


def test_a_kept_checkpoint_outlives_the_runs_and_costs_no_space(run):
    folder = evaluation_sources.evaluation_folder(run, "tiny", 50)
    source = run / "checkpoints/step_000050"
    place = waiting_checkpoints.keep(source, folder)
    assert os.path.samefile(place / "train/weights", source / "train/weights")
    save(run, 150, keep=1)
    assert not source.exists() and checkpoint.read(place).step == 50
    assert list(evaluation_sources.available(run, "tiny")) == [50, 150]
    assert waiting_checkpoints.keep(place, folder) == place  # already there
    waiting_checkpoints.release(folder)
    assert not place.exists() and list(evaluation_sources.available(run, "tiny")) == [150]


def test_a_checkpoint_that_goes_meanwhile_is_not_kept(run):
    folder, source = evaluation_sources.evaluation_folder(run, "tiny", 50), run / "checkpoints/step_000050"
    (source / "train/weights").unlink()
    with pytest.raises(RecipeError) as error:
        waiting_checkpoints.keep(source, folder)
    assert codes(error.value) == {("step", "no-checkpoint")} and not list(folder.iterdir())


# ---- the follower ---------------------------------------------------------------------------------------------------------


SCORES = {"suite": "tiny", "model": "m", "step": None,
          "tasks": {"addition": {"kind": "generate", "metric": "accuracy", "questions": 8, "samples": 8,
          "truncated": 0.25, "unparsed": 0.0, "unjudged": 0, "metrics": {"pass@1": {"value": 0.5, "low": None, "high": None},
          "accuracy": {"value": 0.5, "low": 0.25, "high": 0.75}}}}, "warnings": ["addition: 25% cut"]}  # fmt: skip


class Job:
    """An evaluation that is complete at once, or ends without scores."""

    job_id = "1"

    def status(self, now=False):
        return JobStatus("COMPLETED", ended=True)

    def name(self):
        return "job 1"


@pytest.fixture
def jobs(monkeypatch) -> list[int]:
    """Steps in the order of their evaluations. An evaluation of step 13 fails."""
    asked: list[int] = []

    def start(evaluation):
        step, folder = evaluation.recipe.evaluate.step, evaluation.run_dir
        asked.append(step)
        assert checkpoint.read(Path(evaluation.recipe.evaluate.checkpoint)) or waiting_checkpoints.keep(
            evaluation.source.checkpoint, folder
        )
        if step != 13:
            (folder / score_tables.SCORES).write_text(json.dumps(SCORES))
            made_runs.ended(folder, step)
        return Job()

    monkeypatch.setattr(evaluation_job, "start", start)
    monkeypatch.setattr(follower.run_setup, "live_job", lambda folder: None)
    for name in ("POLL_S", "STATE_S", "RETRY_S", "LOCK_WAIT_S"):
        monkeypatch.setattr(follower, name, 0.0)
    monkeypatch.setattr(follower.follow, "SETTLE_S", 0.0)
    monkeypatch.setattr(follower.follow, "failure", lambda *_: ["it failed"])
    return asked


@pytest.fixture
def states(monkeypatch) -> list[str]:
    """The run's states, one for each query; it then has ended."""
    found: list[str] = []
    monkeypatch.setattr(follower, "state", lambda _: RunState(found.pop(0) if found else "done"))
    return found


def test_each_checkpoint_is_evaluated_once_oldest_first_and_the_last_one_too(run, jobs, states, monkeypatch):
    states += ["running"] * 3
    save(run, 120)  # not a multiple of save_period: only the end makes it due
    made = iter([lambda: save(run, 150, keep=1), lambda: save(run, 170, keep=1)])
    monkeypatch.setattr(follower.time, "sleep", lambda _: next(made, lambda: None)())
    assert CheckpointFollower(FollowRequest(run, "tiny"), "tiny").follow() == 0
    assert jobs == [50, 100, 150, 170]
    assert not list(run.glob("evaluations/tiny/*/checkpoint"))  # all released
    assert CheckpointFollower(FollowRequest(run, "tiny"), "tiny").follow() == 0
    assert jobs == [50, 100, 150, 170]


def test_period_counts_checkpoints_by_step(run, jobs, states):
    save(run, 150)
    assert CheckpointFollower(FollowRequest(run, "tiny", 2), "tiny").follow() == 0
    assert jobs == [100, 150]


def test_what_an_earlier_follower_kept_is_evaluated_first(run, jobs, states):
    waiting_checkpoints.keep(run / "checkpoints/step_000050", evaluation_sources.evaluation_folder(run, "tiny", 50))
    shutil.rmtree(run / "checkpoints/step_000050")
    assert CheckpointFollower(FollowRequest(run, "tiny", 2), "tiny").follow() == 0
    assert jobs == [50, 100]


def test_a_run_of_slurm_is_evaluated_by_slurm(run, monkeypatch):
    each = CheckpointFollower(FollowRequest(run, "tiny"), "tiny")
    assert each._more() == {}
    monkeypatch.setattr(follower, "read_record", lambda _: JobRecord("slurm", "1", "host"))
    assert each._more() == {"cluster": {"executor": "slurm"}}


def test_a_failing_evaluation_is_given_up_and_named(run, jobs, states, capsys):
    save(run, 13)
    shutil.rmtree(run / "checkpoints/step_000050")
    shutil.rmtree(run / "checkpoints/step_000100")
    assert CheckpointFollower(FollowRequest(run, "tiny"), "tiny").follow() == 1
    assert jobs == [13, 13]
    assert "step 13 is given up after 2 tries" in capsys.readouterr().out
    (record,) = evaluated_checkpoints.of_run(run)
    assert record.failed == {13: "it failed"} and not record.followed


def test_two_followers_do_not_work_at_once(run, jobs, states):
    seen = []

    def other(_):
        seen.append(follower_process.is_followed(run / "evaluations/tiny"))
        with pytest.raises(RecipeError) as error:
            CheckpointFollower(FollowRequest(run, "tiny"), "tiny").follow()
        seen.append(codes(error.value))

    follower.time.sleep, before = other, follower.time.sleep
    try:
        CheckpointFollower(FollowRequest(run, "tiny"), "tiny").follow()
    finally:
        follower.time.sleep = before
    assert seen[:2] == [True, {("run", "in-use")}]


# ---- the section `evaluation` ---------------------------------------------------------------------------------------------


def test_keys_of_components_are_those_of_generate():
    section = config.schema.EvaluationConfig(
        "tiny", cluster={"partition": "x", "time_min": 3, "generate": {"nodes": 2}}, overrides={"evaluate.seed": 1}
    )
    expected = {"evaluate": {"seed": 1}, "cluster": {"time_min": 3, "generate": {"partition": "x", "nodes": 2}}}
    assert follower_process.keys_of(section) == expected


def test_a_recipe_with_the_section_is_checked_with_its_evaluations(tmp_path, capsys):
    given = ["recipe=tiny_sft", f"run_dir={tmp_path}/r", "cluster.executor=local", "dry_run=true"]
    assert submit.main([*given, "evaluation.suite=tiny"]) == 0
    assert submit.main([*given, "evaluation.suite=tinny"]) == 2
    assert "evaluation.suite: got 'tinny'; did you mean 'tiny'?" in capsys.readouterr().err
    assert submit.main([*given, "evaluation={suite: tiny, overrides: {evaluate.sead: 1}}"]) == 2
    assert "evaluation: evaluate.sead: is not a key" in capsys.readouterr().err


def test_submission_starts_one_follower(run, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(follower_process, "start_detached", lambda command, *_: started.append(command) or Job())
    monkeypatch.setattr(Job, "pid", 7, raising=False)
    line = follower_process.start(FollowRequest(run, None), "tiny")
    assert started[0][-2:] == [f"run={run}", "step=follow"] and "process 7 evaluates checkpoints by tiny" in line
    (run / "evaluations/tiny").mkdir(parents=True)
    with follower.folder_lock.hold_lock(run / "evaluations/tiny", "run"):
        assert "already" in follower_process.start(FollowRequest(run, None), "tiny")
    assert len(started) == 1


# ---- what is shown --------------------------------------------------------------------------------------------------------


def test_scores_are_a_table():
    assert list(score_tables.lines(SCORES)) == [
        "task      metric    score  95% interval    questions  samples  truncated  unparsed",
        "addition  accuracy  0.500  0.250 to 0.750          8        8      25.0%      0.0%",
        "          pass@1    0.500  -",
        "warning: addition: 25% cut",
    ]


def test_status_shows_what_is_evaluated_and_pending(run, capsys):
    folder = evaluation_sources.evaluation_folder(run, "tiny", 50)
    folder.mkdir(parents=True)
    (folder / score_tables.SCORES).write_text(json.dumps(SCORES))
    made_runs.ended(folder, 50)
    waiting_checkpoints.keep(run / "checkpoints/step_000100", evaluation_sources.evaluation_folder(run, "tiny", 100))
    status.main([str(run)])
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation"))
    assert shown.split(None, 1)[1] == "tiny: step 50: addition 0.500 (0.250 to 0.750); evaluated: 50; pending: 100"


def test_status_of_an_evaluation_shows_its_scores_and_answers(run, capsys):
    source = evaluation_sources.of_checkpoint(
        run, evaluation_sources.read_run(run), evaluation_sources.select(run, "tiny", 50), "tiny"
    )
    folder = source.run_dir
    (folder / "answers").mkdir(parents=True)
    (folder / "answers/addition.jsonl").write_text("{}\n" * 3)
    config.write(suites.inspect("tiny", source, ()).recipe, folder / "recipe.yaml")
    (folder / score_tables.SCORES).write_text(json.dumps(SCORES))
    status.main([str(folder)])
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines()[1:])
    assert rows["answers"] == "addition 3" and rows["addition"].strip() == "0.5" and rows["step"].startswith("50;")
    assert "train" not in rows["runs"] and "checkpoint" not in rows


def test_a_complete_evaluation_is_said_to_be_complete(run, capsys):
    source = evaluation_sources.of_checkpoint(
        run, evaluation_sources.read_run(run), evaluation_sources.select(run, "tiny", 50), "tiny"
    )
    folder = source.run_dir
    folder.mkdir(parents=True)
    (folder / score_tables.SCORES).write_text(json.dumps(SCORES))
    made_runs.ended(folder, 50)
    config.write(suites.inspect("tiny", source, ()).recipe, folder / "recipe.yaml")
    waiting_checkpoints.keep(run / "checkpoints/step_000050", folder)  # as detach=true leaves it
    assert evaluate.main([f"run={run}", "suite=tiny", "step=50"]) == 0
    assert not waiting_checkpoints.checkpoint_folder(folder).exists()
    out = capsys.readouterr().out
    assert f"{folder} is complete" in out and "accuracy  0.500" in out
    assert "holds another recipe" in printed_problems(capsys, f"run={run}", "suite=tiny", "step=50", "evaluate.seed=9")


def test_the_plan_counts_questions_tokens_and_hours():
    gpus = ("cluster.generate.gpus_per_node=2", "policy.precision=bfloat16", "policy.max_total_sequence_length=64")
    recipe = suites.inspect("tiny", evaluation_sources.of_model(MODEL, "tiny"), [*gpus, "plan.answer_tokens=10"]).recipe
    plan = evaluation_plan.plan(recipe)
    (task,) = plan.tasks
    assert task.questions == 128 and task.samples == 1 and task.lengths.answer == 10
    assert plan.seconds > 0 and "received" not in plan.memory.parts and "buffers" not in plan.memory.parts
    text = evaluation_plan.text(plan)
    assert "2 engines" in text and "on 2 GPUs" in text and "fits" in text


def test_a_plan_without_gpus_is_made_if_it_is_asked_for(run, capsys):
    for source in (f"run={run}", f"model={MODEL}"):
        assert evaluate.main([source, "suite=tiny", "plan=true"]) == 0
        out, err = capsys.readouterr()
        assert "tiny: plan for evaluate" in out and err == ""


def test_an_error_without_problems_cannot_be_made():
    with pytest.raises(AssertionError):
        RecipeError()


@pytest.mark.parametrize("reads", [False, True])
def test_a_plan_measures_prompts_of_files(tmp_path, reads):
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "q" * 40, "answer": "1"}) + "\n")
    data = f"{{data_path: {tmp_path / 'test.jsonl'}, split: test}}"
    (tmp_path / "own.yaml").write_text(
        f"algorithm: evaluate\nevaluate: {{tasks: {{own: {{env_name: match, max_new_tokens: 24, data: {data}}}}}}}\n"
        "env: {match: {kind: exact_match}}\n"
    )
    suite = suites.inspect(str(tmp_path / "own.yaml"), evaluation_sources.of_model(MODEL, "own"), [])
    (task,) = evaluation_plan.plan(suite.recipe, reads=reads).tasks
    assert task.questions == 1 and round(task.lengths.prompt) == 10


def test_a_plan_does_not_look_for_data_on_the_network(monkeypatch):
    """A data set in no cache is not read: `datasets` would try to download it, and try again for minutes."""
    read: list[str] = []
    monkeypatch.setattr(evaluation_data, "read", lambda name, task: read.append(name))
    far = "{format: gsm8k, env_name: match, max_new_tokens: 24, data: {dataset_name: nobody/has-this}}"
    keys = [f"evaluate.tasks={{_override_: true, far: {far}}}", "env={match: {kind: exact_match}}"]
    plan = evaluation_plan.plan(suites.inspect("tiny", evaluation_sources.of_model(MODEL, "tiny"), keys).recipe, reads=True)
    assert [task.name for task in plan.tasks] == ["far"] and read == []


def test_a_key_of_an_unknown_task_names_the_nearest_task_first(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = printed_problems(capsys, f"model={MODEL}", "suite=tiny", "evaluate.tasks.additon.data.max_samples=3")
    first, second = text.index("did you mean addition?"), text.index("env_name")
    assert "evaluate.tasks.additon: is not a task of the suite" in text and first < second

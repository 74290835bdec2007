"""`launch/submit.py`: its output, the jobs it starts, its exit status. The jobs are real; ranks run the tests' tasks."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import submit
from launch.executors import slurm_client
from launch.executors.executor import ROOT
from launch.executors.record import read_record
from launch.runs import run_setup
from launch.submission import prepare
from pipeline import config
from pipeline.config import loading
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.waiting import none_alive, reports, wait_until, wait_until_ended

SUBMIT = ROOT / "launch/submit.py"
GPUS = ["cluster.train.gpus_per_node=1", "cluster.generate.gpus_per_node=1"]


@pytest.fixture(autouse=True)
def interruptible():
    """Restore SIGINT if the tests' parent ignores it, as nohup and a shell's background do: processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before or signal.SIG_DFL)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Change to a folder with a recipe `tiny`."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    return tmp_path


@pytest.fixture
def command(monkeypatch, capfd) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process: arguments -> (status, stdout, stderr). task: what its ranks run."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str, task: Callable[[str], None] = tasks.write_steps) -> tuple[int, str, str]:
        monkeypatch.setattr("launch.executors.rank_task.rank_main", task)
        return submit.main(list(arguments)), *capfd.readouterr()

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def dry_run(command) -> Callable[..., tuple[int, str, str]]:
    return lambda *arguments: command("recipe=tiny", "dry_run=true", *arguments)


# ---- the command itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["slurm", pytest.param("local", marks=pytest.mark.full)])
def test_dry_run_writes_nothing_and_imports_no_torch(here, executor):
    code = (
        "import runpy, sys, time; sys.argv = sys.argv[1:]; begin = time.monotonic()\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'vllm', 'megatron', 'datasets', 'rich'} & set(sys.modules)\n"
        "print('IMPORTED', sorted(heavy), 'SECONDS', round(time.monotonic() - begin, 2))"
    )
    arguments = [str(SUBMIT), "recipe=tiny.yaml", "dry_run=true", f"cluster.executor={executor}", "cluster.generate.nodes=2"]
    before = sorted(here.rglob("*"))
    environment = {**os.environ, "PATH": str(here)}  # no sbatch here
    answer = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    print(answer.stdout.splitlines()[-1])
    assert "IMPORTED [] SECONDS" in answer.stdout
    assert sorted(here.rglob("*")) == before
    assert "max_num_steps: 3" in answer.stdout
    assert "# FSDP2 trains, because cluster.train has no GPUs\n" in answer.stdout
    if executor == "slurm":
        assert "#SBATCH hetjob" in answer.stdout
        assert answer.stdout.count("--het-group=") == 2
        assert subprocess.run(["bash", "-n"], input=answer.stdout.partition("# the recipe")[0], text=True).returncode == 0
    else:
        assert answer.stdout.count("-m launch.executors.rank_task") == 3


@pytest.mark.parametrize(
    ("overrides", "problem", "choice"),
    [
        (["data.train.data_path=gone.jsonl"], "data.train.data_path: ", "FSDP2 trains, because cluster.train has no GPUs"),
        (["policy.random_init=false"], "policy.model_name: ", "FSDP2 trains, because cluster.train has no GPUs"),
        (
            ["policy.model_name=org/gone", *GPUS],
            "policy.model_name: 'org/gone' is neither a folder",
            "the train backend depends",
        ),
    ],
)
def test_dry_run_shows_the_submission_despite_missing_files(here, command, dry_run, monkeypatch, overrides, problem, choice):
    monkeypatch.setenv("PATH", str(here))  # no sbatch here
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    status, out, err = dry_run("cluster.executor=slurm", *overrides)
    assert status == 2 and problem in err and "max_num_steps: 3" in out and "# SBATCH_TIMELIMIT=1 from the environment" in out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n") and "\nfinish_job\n" in out and f"# {choice}" in out
    status, _, err = command("recipe=tiny", "cluster.executor=local", *overrides)
    assert status == 2 and problem in err and not (here / "run").exists()


def test_dry_run_of_a_contradicting_recipe_prints_only_its_problems(here, dry_run):
    status, out, err = dry_run("policy.train_global_batch_size=0")
    assert (status, out) == (2, "") and "policy.train_global_batch_size: got 0; expected at least 1 [too-small]" in err


def test_dry_run_warns_of_two_backends(here, dry_run):
    status, out, _ = dry_run("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=true")
    assert status == 0 and "are both true" in out
    assert "# Megatron-Core trains, because policy.megatron_cfg.enabled overrides" in out


def test_the_gpu_behind_a_variable_of_train_ranks_is_printed(here, dry_run):
    cut = ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.executor=slurm"]
    cut += ["cluster.train.gpus_per_node=2", "cluster.generate.gpus_per_node=1"]
    status, out, _ = dry_run(*cut)
    assert status == 0 and "# CUDA_DEVICE_MAX_CONNECTIONS=1 on train ranks, for cluster.train.gpu=h100" in out
    status, _, err = dry_run(*cut, "cluster.train.gpu=h10", "grpo.max_num_steps=0")
    assert status == 2 and "cluster.train.gpu: " in err and "grpo.max_num_steps: " in err


def test_a_model_that_cannot_be_planned_may_still_run(here, command, dry_run):
    described = json.loads((here / "model/config.json").read_text())
    (here / "model/config.json").write_text(json.dumps(described | {"model_type": "opt"}))
    status, out, _ = dry_run()
    assert status == 0 and "no plan" not in out  # of a recipe without GPUs nothing needs it
    status, out, err = command("recipe=tiny", "plan=true")
    assert status == 2 and "the sizes of 'opt' models are not known" in err


def test_works_where_the_package_is_not_installed(here):
    """With -I, Python ignores the current folder, PYTHONPATH, and the editable install of this checkout."""
    code = (
        "import os, runpy, sys; sys.argv = sys.argv[1:]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "sys.path[:] = [sys.argv[0].rpartition('/')[0], *(p for p in sys.path if not os.path.isdir(p + '/pipeline'))]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = [str(SUBMIT), "recipe=tiny.yaml", "dry_run=true"]
    answer = subprocess.run([sys.executable, "-I", "-c", code, *arguments], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


# ---- a run ----------------------------------------------------------------------------------------------------------------


def test_a_run_from_submit_to_done(here, command):
    status, out, _ = command("recipe=tiny")
    assert status == 0 and "step 3/3  train/reward 0.3" in out and "done: step 3" in out
    assert "tiny: FSDP2 trains, because cluster.train has no GPUs" in out
    assert config.read(here / "run/recipe.yaml").policy.dtensor_cfg.enabled is True
    files = {"recipe.yaml", "batch.sh", "manifest.json", "job.json", "submitit"}
    assert {path.name for path in (here / "run").iterdir()} >= files
    (entry,) = json.loads((here / "run/manifest.json").read_text())
    assert entry["executor"] == "local" and entry["job_id"] == read_record(here / "run").job_id
    assert entry["versions"]["submitit"] and entry["python"].startswith("3.")

    status, out, _ = command("recipe=tiny")
    assert status == 0 and "is complete at step 3; raise grpo.max_num_steps" in out

    status, out, _ = command("recipe=tiny", "grpo.max_num_steps=5")
    assert status == 0 and "step 5/5" in out and "step 3/" not in out
    assert len(json.loads((here / "run/manifest.json").read_text())) == 2
    assert len(list((here / "run/attempts").iterdir())) == 2


def test_a_run_that_its_data_ended_resumes_only_with_more_epochs(here, command):
    one_epoch = ("grpo.max_num_steps=1000000", "grpo.max_num_epochs=1")
    (here / "run").mkdir()
    run_setup.prepare(config.with_backend(config.load("tiny", list(one_epoch)), "dtensor"), here / "run", "")
    (here / "run/done.json").write_text('{"step": 2}')
    for arguments in (("grpo.max_num_steps=4", "grpo.max_num_epochs=1"), one_epoch):
        status, out, _ = command("recipe=tiny", *arguments)
        assert status == 0 and "is complete at step 2: its data ended after 1 epoch; raise grpo.max_num_epochs" in out
    assert (here / "run/done.json").exists() and not (here / "run/job.json").exists()

    status, out, _ = command("recipe=tiny", "grpo.max_num_steps=4", "grpo.max_num_epochs=2")
    assert status == 0 and "done: step 4" in out


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            tasks.fail_with_report,
            [
                "rank 1 (realm generate, host here, verb rollout, phase step 3): the dog ate it",
                "logs: {here}/run/attempts/local-",
            ],
        ),
        pytest.param(
            tasks.fail_on_rank_1,
            [
                "FAILED (rank 1 (generate) exited with status 1; crashed with status 1, without a new checkpoint",
                *("rank00001.log", "RuntimeError: rank 1 has had enough"),
            ],
            marks=pytest.mark.full,
        ),
        pytest.param(tasks.report, ["there is no done.json"], marks=pytest.mark.full),
    ],
    ids=["failure.json", "a log", "no done.json"],
)
def test_a_failure_is_printed(here, command, monkeypatch, task, told):
    monkeypatch.setattr("launch.runs.follow.SETTLE_S", 0.0)
    status, out, _ = command("recipe=tiny", task=task)
    assert status == 1 and [text for text in told if text.format(here=here) not in out] == []


def test_detach_follow_and_a_second_submission(here, command):
    status, out, _ = command("recipe=tiny", "detach=true", task=tasks.report_and_wait)
    assert status == 0 and f"follow={here}/run" in out
    found = reports(here / "run", 2)
    job = read_record(here / "run").attach(here / "run")

    status, _, err = command("recipe=tiny")
    assert status == 2 and f"run_dir: local job {job.job_id} still writes into" in err
    job.cancel()
    wait_until_ended(job)
    none_alive(found)

    status, out, _ = command(f"follow={here}/run")
    assert status == 1 and "CANCELLED (by SIGTERM)" in out


@pytest.mark.full
def test_needs_run_first_and_once(here, command):
    base = write_recipe(here, "base", run_dir="elsewhere")
    base.write_text(base.read_text() + "name: of_its_own\n")
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    status, _, err = command("recipe=second", "detach=true")
    assert status == 2 and "local executor cannot wait" in err
    status, out, _ = command("recipe=second", "cluster.executor=local", "grpo.max_num_steps=2")
    assert status == 0 and out.index("of_its_own: local job") < out.index("second: local job")
    assert json.loads((here / "runs/base/done.json").read_text()) == {"step": 3}  # its own recipe, not this command's keys
    assert json.loads((here / "runs/second/done.json").read_text()) == {"step": 2}

    status, out, _ = command("recipe=second", "grpo.max_num_steps=4")
    assert status == 0 and "of_its_own: local job" not in out


def test_a_failed_need_stops_the_rest(here, command):
    write_recipe(here, "base")
    write_recipe(here, "second", needs=["base"], run_dir="runs/second")
    assert command("recipe=second", task=tasks.fail_with_report)[0] == 1
    assert not (here / "runs/second").exists()


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------------

SUBMIT_WAITING = (
    "import sys; from launch import submit; from launch.executors import rank_task; from tests.launch import tasks;"
    "rank_task.rank_main = tasks.report_and_wait; sys.exit(submit.main(['recipe=tiny.yaml']))"
)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_without_a_terminal_the_first_signal_cancels(here, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SUBMIT_WAITING],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = reports(here / "run", 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "CANCELLED" in out
    none_alive(found)


@pytest.mark.full
def test_at_a_terminal_ctrl_c_asks_first(here):
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", SUBMIT_WAITING])
    screen = bytearray()

    def shows(text: bytes) -> bool:
        if text in screen:
            return True
        try:
            screen.extend(os.read(terminal, 4096))
        except OSError:  # the other end is closed
            return text in screen
        return text in screen

    found = reports(here / "run", 2)
    wait_until(lambda: shows(b"RUNNING"), "the live view")
    os.write(terminal, b"\x03")
    wait_until(lambda: shows(b"Enter to go on"), "the question")
    os.write(terminal, b"\n")
    del screen[:]
    wait_until(lambda: shows(b"RUNNING"), "the live view again")
    os.write(terminal, b"\x03")
    wait_until(lambda: shows(b"Enter to go on"), "the question again")
    time.sleep(0.1)  # a terminal's Ctrl-C reaches whoever reads; let it read
    os.write(terminal, b"\x03")
    wait_until(lambda: shows(b"CANCELLED"), "the end")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    none_alive(found)


# ---- on Slurm -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_slurm(here, slurm_cluster, monkeypatch) -> Path:
    slurm_cluster.enter(monkeypatch)
    write_recipe(here, "base", cluster={"executor": "auto"})
    write_recipe(here, "second", needs=["base"], run_dir="runs/second", cluster={"executor": "auto"})
    return here


@pytest.mark.slurm
def test_auto_chooses_slurm_if_there_is_one(on_slurm, command):
    status, out, _ = command("recipe=base")
    assert status == 0 and "base: Slurm job" in out and "step 3/3" in out and "done: step 3" in out
    assert (on_slurm / "run/batch.sh").read_text().count("#SBATCH hetjob") == 1
    status, out, _ = command("recipe=base", "run_dir=other", task=tasks.fail_with_report)
    assert status == 1 and "the dog ate it" in out


@pytest.mark.slurm
def test_detached_needs_are_chained(on_slurm, command):
    assert command("recipe=second", "detach=true")[0] == 0
    assert read_record(on_slurm / "runs/base").executor == "slurm"
    assert command(f"follow={on_slurm}/runs/second")[0] == 0
    assert (on_slurm / "runs/base/done.json").stat().st_mtime <= (on_slurm / "runs/second/done.json").stat().st_mtime
    assert f"afterok:{read_record(on_slurm / 'runs/base').job_id}" in (on_slurm / "runs/second/batch.sh").read_text()


@pytest.mark.slurm
def test_a_refusal_by_sbatch_is_printed(on_slurm, command, monkeypatch):
    monkeypatch.setattr(prepare.slurm_job, "problems", lambda *_: iter(()))  # as if the partition went after it was looked for
    status, _, err = command("recipe=base", "cluster.train.partition=nowhere")
    assert status == 2 and "[refused-by-slurm]" in err and "invalid partition" in err
    monkeypatch.setattr(slurm_client, "CHANGE_S", 1e-3)
    status, _, err = command("recipe=base")
    assert status == 2 and "[unreachable]" in err and "squeue --me" in err


def test_a_closed_pipe_gives_no_traceback():
    """The reader ends early, as `| head` does."""
    command = [sys.executable, str(ROOT / "launch/submit.py"), "recipe=tiny_grpo", "show=true"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (128 + signal.SIGPIPE, "")

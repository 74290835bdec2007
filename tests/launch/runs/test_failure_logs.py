"""Log lines shown for a run that failed under Slurm without failure.json; the files are as the batch script leaves them."""

from pathlib import Path

import pytest

from launch.runs.attempts import AttemptFolder, latest
from launch.runs.failure_logs import container_failure, failed_log_lines
from tests.launch.model import write_recipe

MISSING = "bash: line 1: exec: /no/python3: cannot execute: No such file or directory"
INNOCENT = "slurmstepd-n1: error: pyxis: container exited too soon"


@pytest.fixture
def attempt(tmp_path) -> AttemptFolder:
    """Return an attempt of two components of two ranks; generate has failed."""
    folder = tmp_path / "attempts/17-0"
    folder.mkdir(parents=True)
    (folder / "started").write_text("1.0\n")
    (folder / "failed_step").write_text("generate 2\n")
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit/17_0_log.out").write_text(f"{INNOCENT}\nhetstep: the generate component failed\n")
    (folder / "srun-train.out").write_text(f"{INNOCENT}\nsrun: error: n1: tasks 0-1: Exited with exit code 1\n")
    write_recipe(tmp_path, "recipe", cluster={"generate": {"container_image": "/images/generate.sqsh"}})
    return latest(tmp_path)


def write(attempt: AttemptFolder, **texts: str) -> None:
    """Write logs. srun: its output for generate; rank2, rank3: their logs."""
    for name, text in texts.items():
        log = "srun-generate.out" if name == "srun" else f"rank{int(name[4:]):05d}.log"
        (attempt.folder / log).write_text(text)


def run_dir(attempt: AttemptFolder) -> Path:
    return attempt.folder.parents[1]


@pytest.mark.parametrize("tasks", ["task 1", "tasks 1-3"])
def test_the_log_of_the_first_failed_task_is_shown(attempt, tasks):
    write(attempt, srun=f"srun: error: n2: {tasks}: Exited with exit code 127\n", rank2="loading\n", rank3=f"{MISSING}\n")
    lines = failed_log_lines(run_dir(attempt), attempt, 30)
    assert lines[:2] == [f"the end of {attempt.folder}/rank00003.log:", f"  {MISSING}"]
    assert lines[2:] == ["  cause: the image has no such program. cluster.generate.python names a Python of the image"]
    assert container_failure(run_dir(attempt), attempt) == []


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("ModuleNotFoundError: No module named 'submitit'", "the image's Python, cluster.generate.python, lacks this package"),
        (
            "python3: libc.so.6: version `GLIBC_2.38' not found (required by python3)",
            "a mounted program needs a newer C library",
        ),
        ("ImportError: libz.so.1: cannot open shared object file: No such file or directory", "the image lacks this library"),
        ("ValueError: too few values", None),
    ],
)
def test_what_an_image_lacks_is_said(attempt, said, cause):
    write(attempt, srun="srun: error: n2: task 1: Exited with exit code 1\n", rank2="", rank3=f"File x, line 3\n{said}\n")
    *_, shown, last = ["", *failed_log_lines(run_dir(attempt), attempt, 30)]
    assert (last == f"  {said}") if cause is None else last.startswith(f"  cause: {cause}") and shown == f"  {said}"
    write_recipe(run_dir(attempt), "recipe")  # without an image
    assert failed_log_lines(run_dir(attempt), attempt, 30)[-1] == f"  {said}"


def test_sruns_output_is_shown_for_a_rank_without_a_log(attempt):
    write(attempt, srun="srun: error: n2: task 1: Killed\n", rank2="", rank3="")
    assert failed_log_lines(run_dir(attempt), attempt, 30) == [
        f"the end of {attempt.folder}/srun-generate.out:",
        "  srun: error: n2: task 1: Killed",
    ]


@pytest.mark.parametrize("begin", ["slurmstepd-{node}: ", "[2026-11-22T15:57:23.927] "], ids=["Slurm 22.05", "Slurm 26.05"])
def test_a_container_that_did_not_start_is_named_with_its_first_nodes_output(attempt, begin):
    words = [
        "failed to create container filesystem for image: /tmp/x",
        "printing enroot log file:",
        "    FATAL ERROR: corrupted",
    ]
    of_nodes = [f"{begin.format(node=node)}error: pyxis: {each}" for each in words for node in ("n3", "n4")]
    around = ["srun: job 17 queued", *of_nodes, "slurmstepd-n3: error: spank: task_init() failed with rc=-1"]
    write(attempt, srun="\n".join([*around, "srun: error: n3: task 0: Exited with exit code 1", ""]))
    head, *said = container_failure(run_dir(attempt), attempt)
    assert head == (
        "the container of the generate component did not start (cluster.generate.container_image: /images/generate.sqsh);"
        " pyxis reports:"
    )
    assert said == [f"  {each}" for each in words]


def test_the_log_of_a_killed_batch_script_is_shown(attempt):
    (attempt.folder / "failed_step").unlink()
    write(attempt, srun="srun: error: n2: task 1: Killed\n")
    assert failed_log_lines(run_dir(attempt), attempt, 30)[0] == f"the end of {run_dir(attempt)}/submitit/17_0_log.out:"
    assert container_failure(run_dir(attempt), attempt) == []

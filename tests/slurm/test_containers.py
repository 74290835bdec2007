"""Containers: what a job's script asks of pyxis, which a plugin of the tests' own takes in its place (pyxis_stub.c)."""

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from launch.executors import slurm
from launch.executors.executor import ROOT
from pipeline.config import ClusterConfig, ComponentConfig, loading
from tests.end_to_end import runs
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.test_submit import command, interruptible  # noqa: F401
from tests.launch.waiting import reports
from tests.slurm import pyxis
from tests.slurm.cluster import missing
from tests.slurm.wrapper import sbatch, wait_for


@pytest.fixture(scope="module")
def own_cluster():
    if lacking := [*missing(), *pyxis.missing()]:
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(f"not here: {lacking}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, pyxis.cluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def cluster(own_cluster, monkeypatch):
    own_cluster.enter(monkeypatch)
    for record in (own_cluster.folder / "tasks").iterdir():
        record.unlink()
    return own_cluster


# ---- the plugin's options -----------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_the_plugin_takes_each_option_and_records_a_tasks_settings(cluster, tmp_path):
    image = pyxis.image(tmp_path / "x.sqsh")
    mounts = f"--container-mounts={tmp_path}:/data:ro+rprivate,tmpfs:/scratch,{tmp_path}:/odd:ro:rw"
    given = [f"--container-image={image}", mounts, f"--container-workdir={tmp_path}", "--container-readonly"]
    answer = pyxis.srun(cluster, *given, "--container-env=A,B", "--no-container-mount-home", A="1", B="two words")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == str(tmp_path)
    (task,) = pyxis.tasks(cluster)
    assert task["container-image"] == str(image)
    assert task["container-mounts"] == mounts.partition("=")[2]
    assert (task["container-writable"], task["container-mount-home"]) == ("0", "0")
    assert (task["env:A"], task["env:B"]) == ("1", "two words")


@pytest.mark.slurm
def test_the_plugin_refuses_what_pyxis_refuses(cluster, tmp_path):
    image = f"--container-image={pyxis.image(tmp_path / 'x.sqsh')}"
    other = f"--container-image={pyxis.image(tmp_path / 'y.sqsh')}"
    refused = {
        "unrecognized option": (image, "--container-colour=red"),
        "--container-image specified multiple times": (image, other),
        "both --container-writable and its opposite": (image, "--container-writable", "--container-readonly"),
        "no such file to mount: /nowhere": (image, "--container-mounts=/nowhere:/x"),
        "neither --container-image nor --container-name": (f"--container-mounts={tmp_path}:/x",),
        "not absolute: here": (image, "--container-workdir=here"),
        "no such image": (f"--container-image={tmp_path}/no.sqsh",),
        "'NOT_SET' is not set": (image, "--container-env=NOT_SET"),
    }
    for says, options in refused.items():
        answer = pyxis.srun(cluster, *options)
        assert answer.stdout == "", options  # the task did not run; of an image that is missing srun exits with 0 all the same
        assert says in answer.stderr, answer.stderr


# ---- requests of a job --------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Change to a folder with two images and a recipe `tiny` of two components, each in its own container."""
    for name in ("train", "generate"):
        pyxis.image(tmp_path / f"{name} image.sqsh")
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    return tmp_path


def contained(here: Path) -> list[str]:
    """Return overrides in which the two components differ in everything."""
    mounts = f"[{here}:{here},{ROOT}:{ROOT}]"
    return [
        "cluster.executor=slurm",
        "cluster.train.nodes=2",
        f"cluster.train.container_image={here}/train image.sqsh",
        f"cluster.train.container_mounts={mounts}",
        f"cluster.train.container_workdir={here}",
        "cluster.train.srun_args=[--container-env=TEST_VAR]",
        f"cluster.train.python={sys.executable}",
        f"cluster.generate.container_image={here}/generate image.sqsh",
        f"cluster.generate.container_mounts=[{ROOT}:{ROOT}:ro,{here}]",
        "cluster.generate.srun_args=[--container-writable]",
        f"cluster.generate.python={sys.executable}",
    ]


@pytest.mark.slurm
def test_each_component_runs_in_its_own_image(cluster, here, monkeypatch, command):  # noqa: F811
    monkeypatch.setenv("TEST_VAR", "the node's")
    monkeypatch.setenv("HF_HOME", str(here / "cache"))
    assert command("recipe=tiny", "grpo.max_num_steps=1", *contained(here), task=tasks.report_and_finish)[0] == 0
    found = pyxis.tasks(cluster)
    train = [task for task in found if task["container-image"] == f"{here}/train image.sqsh"]
    (generate,) = [task for task in found if task["container-image"] == f"{here}/generate image.sqsh"]
    assert len(train) == 2 and len(found) == 3
    assert {task["container-mounts"] for task in train} == {f"{here}:{here},{ROOT}:{ROOT}"}
    assert {task["container-workdir"] for task in train} == {str(here)}
    assert {task["env:TEST_VAR"] for task in train} == {"the node's"}
    assert generate["container-mounts"] == f"{ROOT}:{ROOT}:ro,{here}"
    assert generate["container-writable"] == "1" and "container-writable" not in train[0]
    assert "container-workdir" not in generate and "env:TEST_VAR" not in generate


@pytest.mark.full
@pytest.mark.slurm
def test_two_images_on_one_node(cluster, here, monkeypatch, command):  # noqa: F811
    monkeypatch.setenv("TEST_VAR", "the node's")
    sizes = [f"cluster.{name}.{size}" for name in ("train", "generate") for size in ("gpus_per_node=4", "ranks_per_node=1")]
    keys = (
        "recipe=tiny",
        "grpo.max_num_steps=1",
        *contained(here),
        "cluster.train.nodes=1",
        "cluster.share_nodes=true",
        *sizes,
    )
    assert command(*keys, task=tasks.report_and_finish)[0] == 0
    images = sorted(task["container-image"] for task in pyxis.tasks(cluster))
    assert images == [f"{here}/generate image.sqsh", f"{here}/train image.sqsh"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in reports(here / "run", 2)] == ["0,1,2,3", "4,5,6,7"]


@pytest.mark.slurm
def test_an_image_that_a_node_cannot_start_ends_the_job_at_once(cluster, here, monkeypatch, command):  # noqa: F811
    """The image is named with pyxis's message. The other component's ranks would wait until their timeout."""
    pyxis.image(here / "generate image.sqsh", corrupt=True)
    monkeypatch.setenv("TEST_VAR", "1")
    status, said, _ = command("recipe=tiny", *contained(here), task=tasks.report)
    assert status == 1
    assert "the generate component failed" in said
    assert (
        "the container of the generate component did not start (cluster.generate.container_image: "
        f"{here}/generate image.sqsh); pyxis reports:\n  container start failed with error code: 1\n"
    ) in said
    assert "train image.sqsh" not in said.partition("the run failed")[2]


@pytest.mark.full
@pytest.mark.slurm
def test_an_interpreter_that_is_not_in_an_image_is_named(cluster, here, monkeypatch, command):  # noqa: F811
    overrides = [each for each in contained(here) if not each.startswith("cluster.generate.python")]
    monkeypatch.setenv("TEST_VAR", "1")
    status, said, _ = command("recipe=tiny", *overrides, "cluster.generate.python=/no/python3", task=tasks.report_and_wait)
    assert status == 1
    said = said.partition("the run failed")[2]
    assert re.search(r"the end of \S+/rank00002.log:\n  \S*bash: .*/no/python3: No such file or directory\n", said), said
    assert "the generate component failed; task 0 of its step is rank 2" in said


@pytest.mark.full
@pytest.mark.slurm
def test_a_missing_image_ends_the_job_at_once(cluster, here, monkeypatch, command):  # noqa: F811
    """srun exits with 0 in this case."""
    overrides = [each for each in contained(here) if not each.startswith("cluster.generate.container_image")]
    image = "cluster.generate.container_image=registry#no/such:image"
    monkeypatch.setenv("TEST_VAR", "1")
    status, said, _ = command("recipe=tiny", *overrides, image, task=tasks.report)
    assert status == 1
    assert "the generate component failed" in said and "there is no registry to fetch registry#no/such:image from" in said


@pytest.mark.slurm
def test_the_batch_wrapper_takes_container_and_mounts_from_the_environment(cluster, here, monkeypatch):
    """The variables are those of NeMo-RL's ray.sub."""
    monkeypatch.setenv("CONTAINER", f"{here}/train image.sqsh")
    monkeypatch.setenv("MOUNTS", f"{here}:{here},{ROOT}:{ROOT}")
    monkeypatch.setenv("COMMAND", "uv run examples/run_grpo.py")
    python = [f"cluster.{name}.python={sys.executable}" for name in ("train", "generate")]
    _, out = sbatch(here, "-N2", "write_steps", f"cluster.generate.container_image={here}/generate image.sqsh", *python)
    wait_for("done: step 3", out)
    assert f"# cluster.train.container_image={here}/train image.sqsh, from the environment" in out()
    assert "# COMMAND: not used; the command line names the recipe" in out()
    train, generate = sorted(pyxis.tasks(cluster), key=lambda task: task["container-image"], reverse=True)
    assert train["container-image"] == f"{here}/train image.sqsh"
    assert generate["container-image"] == f"{here}/generate image.sqsh"
    assert {task["container-mounts"] for task in (train, generate)} == {f"{here}:{here},{ROOT}:{ROOT}"}
    assert {task["container-workdir"] for task in (train, generate)} == {str(here)}


@pytest.mark.long
@pytest.mark.slurm
def test_a_whole_run_in_two_images(cluster, tmp_path):
    for name in ("train", "generate"):
        pyxis.image(tmp_path / f"{name} image.sqsh")
    placed = [override for override in contained(tmp_path) if not override.startswith("cluster.executor")]
    model = [f"cluster.{name}.container_workdir={ROOT}" for name in ("train", "generate")]
    done = runs.submit(tmp_path / "run", *runs.SLURM, *placed, *model, env={**cluster.env, "TEST_VAR": "1"})
    assert done.status == 0, done.output
    assert len(done.metrics()) == 4
    assert {task["container-image"] for task in pyxis.tasks(cluster)} == {
        f"{tmp_path}/train image.sqsh",
        f"{tmp_path}/generate image.sqsh",
    }


def test_an_image_that_sets_the_job_s_variables_cannot_hide_code_and_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", "~/cache")
    monkeypatch.setenv("HF_HUB_CACHE", "/shared/hub")
    script = slurm.batch_script(
        tmp_path,
        "x",
        ClusterConfig(),
        {"train": ComponentConfig(container_image="/x.sqsh"), "generate": ComponentConfig()},
    )
    inside, outside = (line for line in script.splitlines() if "srun --het-group" in line)
    code = shlex.quote(str(ROOT)).replace("'", """'"'"'""")  # within quotes
    assert f"export HF_HOME={Path.home()}/cache HF_HUB_CACHE=/shared/hub; export PYTHONPATH={code}${{PYTHONPATH:+" in inside
    assert "HF_HOME" not in outside and "PYTHONPATH" not in outside

"""Ranks in images of a real Apptainer or SingularityCE, and what a user reads if a container does not start."""

import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from launch.executors.containers import runtimes
from launch.executors.containers.runtimes import RUNTIMES
from launch.executors.executor import ROOT
from pipeline.config import ClusterConfig, ComponentConfig, loading
from tests.end_to_end import runs
from tests.launch import tasks
from tests.launch.model import write_recipe
from tests.launch.test_submit import command, interruptible  # noqa: F401
from tests.slurm import apptainer


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Return a folder with the images train.sif and generate, which is a folder. Skips where Apptainer is not installed."""
    folder = tmp_path_factory.mktemp("images")
    if apptainer.program() is None:
        pytest.skip("no apptainer or singularity here")
    generate = apptainer.image(folder / "generate", "generate")
    started = apptainer.run("exec", str(generate), "cat", "/etc/image")
    if started.returncode:
        pytest.skip(f"{apptainer.program()} starts no container here: {started.stderr}")
    apptainer.image(folder / "train.sif", "train")
    return folder


@pytest.fixture
def cluster(slurm_cluster, monkeypatch):
    slurm_cluster.enter(monkeypatch)
    monkeypatch.setenv("PATH", apptainer.PATH)
    return slurm_cluster


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Change to a folder with a recipe `tiny`."""
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "RECIPES", tmp_path)
    return tmp_path


def contained(here: Path, train: Path, generate: Path) -> list[str]:
    """Return overrides that run the components in these images."""
    keys = {"container_mounts": f"[{','.join(apptainer.mounts(here))}]", "python": sys.executable}
    parts = {"train": {**keys, "container_image": train}, "generate": {**keys, "container_image": generate}}
    placed = [f"cluster.{name}.{key}={value}" for name, part in parts.items() for key, value in part.items()]
    return ["cluster.container_runtime=apptainer", *placed]


def test_the_options_of_each_runtime():
    gpus = ComponentConfig(
        gpus_per_node=8,
        container_image="/x.sif",
        container_mounts=["/a", "/b:/c:ro"],
        container_workdir="/a",
        container_args=["-u"],
    )
    (options, words), cpus = runtimes.start("apptainer", gpus), ComponentConfig(container_image="/x.sif")
    assert options == [] and words[4:] == [*["--nv", "--bind", "/a", "--bind", "/b:/c:ro", "--pwd", "/a", "-u", "/x.sif"]]
    assert runtimes.start("apptainer", cpus)[1][4:] == ["/x.sif"]
    assert runtimes.start("apptainer", ComponentConfig()) == runtimes.start("none", ComponentConfig()) == ([], [])
    mounts = "--container-image=/x.sif --container-mounts=/a,/b:/c:ro --container-workdir=/a"
    assert runtimes.start("pyxis", gpus) == (mounts.split(), [])


def test_the_schema_lists_the_runtimes():
    assert set(get_args(get_type_hints(ClusterConfig)["container_runtime"])) == set(RUNTIMES)


@pytest.mark.slurm
def test_each_component_runs_in_its_own_image(cluster, here, images, monkeypatch, command):  # noqa: F811
    for name, value in {
        "NCCL_DEBUG": "WARN",
        "TEST_VAR": "$(id) `id` \"two\" 'words'",
        "HF_HOME": str(here / "cache"),
        "TMPDIR": str(here / "disk"),
        "CUDA_HOME": "/opt/cuda",
        "APPTAINER_CONTAINALL": "1",
    }.items():
        monkeypatch.setenv(name, value)
    (here / "disk").mkdir()
    overrides = [
        "cluster.executor=slurm",
        "cluster.train.nodes=2",
        f"cluster.train.container_workdir={here}",
        "cluster.generate.env_vars={NCCL_DEBUG: INFO}",
    ]
    given = contained(here, images / "train.sif", images / "generate")
    status, out, said = command("recipe=tiny", "grpo.max_num_steps=1", *overrides, *given, task=tasks.report_container)
    assert status == 0, out + said
    found = [json.loads((here / f"run/container{rank}.json").read_text()) for rank in range(3)]
    assert [each["image"] for each in found] == ["train", "train", "generate"]
    assert {each["folder"] for each in found[:2]} == {str(here)}
    home = f"{here}/disk/hetstep-{os.getuid()}/home"
    assert {tuple(each["writable"]) for each in found} == {("/tmp", "/dev/shm", home, f"{here}/disk")}
    of_train, *_, of_generate = (each["environment"] for each in found)
    assert of_train["TEST_VAR"] == "$(id) `id` \"two\" 'words'" and of_train["HOME"] == home
    assert (of_train["NCCL_DEBUG"], of_generate["NCCL_DEBUG"]) == ("WARN", "INFO")
    assert of_train["HF_HOME"] == f"{here}/cache" and of_train["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert of_train["SLURM_PROCID"] == "0" and "CUDA_HOME" not in of_train
    inputs = {entry["key"]: entry for entry in json.loads((here / "run/lineage/inputs.json").read_text())["inputs"]}
    listed = [len(inputs[f"cluster.{name}.container_image"]["files"]) for name in ("train", "generate")]
    assert listed == [1, 0]  # not the files of the folder


# ---- faults -------------------------------------------------------------------------------------------------------------


AS_USER = ("unshare", "-U", "--map-user=1000", "--map-group=1000")
LIMIT = 'echo 0 >/proc/sys/user/max_user_namespaces; exec setpriv --ambient-caps=-all --inh-caps=-all "$@"'
NO_NAMESPACES = [*AS_USER, "--keep-caps", "bash", "-c", LIMIT, "x"]
NO_FUSE = ["unshare", "-m", "bash", "-c", 'mount --bind "$1" /dev/fuse && shift && exec "$@"', "x"]
NO_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
ARM = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00\x01" + bytes(43)  # the header of a program for AArch64


def programs_of(folder: Path, *names: str, options: str = "") -> str:
    """Return a PATH of bash, mkdir, and Apptainer by these names, with these options."""
    for name in ("bash", "mkdir"):
        (folder / name).symlink_to(f"/bin/{name}")
    for name in names:
        (folder / name).write_text(f'#!/bin/bash\nexec {shlex.quote(str(apptainer.program()))} {options} "$@"\n')
        (folder / name).chmod(0o755)
    return str(folder)


def file_of(path: Path, content: bytes, mode: int = 0o644) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def small_image(path: Path, **programs: bytes) -> Path:
    """Make an image with these programs alone."""
    for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (path / folder).mkdir(parents=True)
    for name, content in programs.items():
        file_of(path / "bin" / name, content, 0o755)
    return path


def fuse_of_another_user(path: Path) -> list[str]:
    """Return the command that hides /dev/fuse from other users than nobody, as root alone can."""
    if os.geteuid():
        pytest.skip("needs root")
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(10, 229))
    os.chown(path, 65534, 65534)
    return [*NO_FUSE, str(path), *AS_USER]


FAULTS = {
    "no image": ("gone.sif", "that node does not see the image"),
    "unreadable": ("mode0.sif", "the user of the job may not read the image"),
    "no format": ("text.sif", "the image is damaged"),
    "no mount": ("", "a folder of container_mounts is missing on that node"),
    "no layer": ("", "the image lacks the target of a mount"),
    "no binds": ("", "that node's Apptainer lets users mount nothing"),
    "no bash": ("empty", "the image has no bash"),
    "other CPU": ("arm", "the image is for another CPU"),
    "no program": ("", "Apptainer is not installed on that node"),
    "no namespaces": ("", "that node lets users make no namespaces"),
    "no FUSE": ("train.sif", "that node lets users mount no image by FUSE"),
    "only singularity": ("", ""),
}
"""Fault -> (image, the beginning of its cause)."""
SITES = {"no layer": "enable overlay = no\nenable underlay = no\n", "no binds": "user bind control = no\n"}
"""Fault -> lines of apptainer.conf."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_container_that_does_not_start(images, tmp_path, fault):
    """The words of srun's task run without Slurm, so that each fault is Apptainer's own message."""
    name, cause = FAULTS[fault]
    image = {
        "mode0.sif": lambda path: file_of(path, (images / "train.sif").read_bytes(), 0),
        "text.sif": lambda path: file_of(path, b"not an image"),
        "empty": small_image,
        "arm": lambda path: small_image(path, sh=ARM, bash=ARM),
        "gone.sif": lambda path: path,
    }.get(name, lambda _: images / (name or "generate"))(tmp_path / (name or "x"))
    wrapper = {"unreadable": lambda: NO_OVERRIDE, "no namespaces": lambda: NO_NAMESPACES}
    wrapper |= {"no FUSE": lambda: fuse_of_another_user(tmp_path / "fuse")}
    path = {"no program": lambda: programs_of(tmp_path), "only singularity": lambda: programs_of(tmp_path, "singularity")}
    mounts = {"no mount": ["/nowhere:/data"], "no layer": ["/bin:/data"], "no binds": ["/bin:/data"]}.get(fault, [])
    if fault in SITES:
        config = file_of(tmp_path / "site.conf", f"root default capabilities = no\n{SITES[fault]}".encode())
        path[fault] = lambda: programs_of(tmp_path, "apptainer", options=f"--config {config}")
    options, words = RUNTIMES["apptainer"].start(ComponentConfig(container_image=str(image), container_mounts=mounts))
    answer = subprocess.run(
        [*wrapper.get(fault, list)(), *words, "bash", "-c", "cat /etc/image /data" if mounts else "cat /etc/image"],
        env={**os.environ, "PATH": path.get(fault, lambda: apptainer.PATH)(), "SLURMD_NODENAME": "n1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if "--config requires" in answer.stderr:
        pytest.skip("with the setuid part only root may choose apptainer.conf")
    errors = RUNTIMES["apptainer"].start_errors(answer.stderr.splitlines())
    assert options == [] and bool(answer.returncode) == bool(errors) == bool(cause), answer.stderr
    assert RUNTIMES["apptainer"].cause(errors).startswith(cause), answer.stderr
    assert cause or answer.stdout == "generate"


@pytest.mark.full
@pytest.mark.slurm
def test_an_image_that_starts_no_task_ends_the_job_with_its_cause(cluster, here, images, command):  # noqa: F811
    image = here / "generate.sif"
    assert apptainer.run("build", str(image), str(small_image(here / "root"))).returncode == 0
    status, said, _ = command(
        "recipe=tiny", "cluster.executor=slurm", *contained(here, images / "train.sif", image), task=tasks.report
    )
    assert status == 1
    said = said.partition("the run failed")[2]
    named = f"cluster.generate.container_image: {image}"
    assert f"the container of the generate component did not start ({named}); apptainer reports:\n" in said
    assert "\n  cause: the image has no bash" in said, said


# ---- whole runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slurm
def test_a_whole_run_in_two_images_that_survives_a_kill(cluster, tmp_path, images):
    given, env = (
        [*runs.SLURM, *contained(tmp_path, images / "train.sif", images / "generate")],
        {**cluster.env, "PATH": apptainer.PATH},
    )
    whole = runs.submit(tmp_path / "whole", *given, env=env)
    assert whole.status == 0, whole.output
    fault = runs.Fault("step", victim=3, count=3, once=True)  # in the second step
    killed = runs.submit(tmp_path / "killed", *given, "cluster.requeue.max_restarts=2", env=env, fault=fault)
    assert killed.status == 0, killed.output
    assert killed.verdicts()[0].startswith("requeue: ") and killed.verdicts()[-1] == "done"
    assert killed.metrics() == whole.metrics() and len(whole.metrics()) == 4

"""containers/: the images' pinned sets agree with each other and with the tests' packages.

Also which programs build.sh calls, and with which arguments.
"""

import ctypes.util
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from containers.check_image import RELEASES, differences, kernel_problems, main, pins, problems
from pipeline.node import c_compiler, torch_features
from tests.problems import named
from tests.test_imports import imports

ROOT = Path(__file__).parent.parent
CONTAINERS = ROOT / "containers"
KINDS = ("train", "generate")
BASE = {"torch", "numpy", "triton", "setuptools", "jinja2"}  # in both base images, and must stay
ONLY_TRAIN = {"megatron", "transformer_engine", "peft", "accelerate"}
WITH_VLLM = {"vllm", "httpx", "aiohttp", "openai"}  # in the generate image's base; no train rank imports them
ON_DEMAND = {  # what lm_eval imports only for metrics and tables that no suite has
    *("evaluate", "more-itertools", "pytablewriter", "rouge-score", "scikit-learn", "sqlitedict", "word2number"),
}


def pinned(path: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in pins(path).items()}


LOCK = pinned(CONTAINERS / "requirements-cpu.lock")
SETS = {kind: pinned(CONTAINERS / kind / "requirements.txt") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_versions_match_the_lock_and_pyproject(kind):
    assert {name: version for name, version in SETS[kind].items() if LOCK.get(name) != version} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]:
        requirement = Requirement(line)
        version = (SETS[kind] | RELEASES[kind]).get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version), line
    assert f'"vllm=={RELEASES["generate"]["vllm"]}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_complete_without_dependencies(kind):
    """pip installs it with --no-deps: each package's dependencies are in the set or in the base."""
    missing = []
    for name in SETS[kind]:
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                package = canonicalize_name(needed.name)
                if package not in SETS[kind].keys() | BASE | ON_DEMAND:
                    missing.append(f"{name} needs {needed.name}")
                elif package not in BASE | ON_DEMAND and (version := SETS[kind][package]):
                    assert needed.specifier.contains(version, prereleases=True), f"{name} needs {line}, not {version}"
    assert missing == []


def test_the_sets_contain_the_pipelines_imports():
    found = {name.split(".")[0] for path in ROOT.glob("pipeline/**/*.py") for name in imports(path)}
    packages = {name: {*map(canonicalize_name, of)} for name, of in metadata.packages_distributions().items() if name in found}
    packages.pop("pipeline", None)  # if it is installed
    assert {"torch", "transformers", "vllm", "megatron", "omegaconf"} <= packages.keys()
    for kind, elsewhere in (("train", WITH_VLLM | {"lm_eval", "bm25s"}), ("generate", WITH_VLLM | ONLY_TRAIN | {"bm25s"})):
        needed = packages.keys() - elsewhere
        assert {name for name in needed if not packages[name] & (SETS[kind].keys() | BASE)} == set(), kind


def test_a_login_node_has_what_its_commands_import():
    submit = pinned(CONTAINERS / "requirements-submit.txt")
    assert {name: version for name, version in submit.items() if LOCK[name] != version} == {}
    code = "import sys, hetstep, launch.sweep, launch.submit; print(*{name.split('.')[0] for name in sys.modules})"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/launch/api"}
    loaded = {
        *subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout.decode().split()
    }
    ours = {
        name.split(".")[0]
        for folder in ("launch", "pipeline")
        for path in ROOT.glob(f"{folder}/**/*.py")
        for name in imports(path)
    }
    packages = metadata.packages_distributions()
    needed = {canonicalize_name(package) for name in loaded & ours for package in packages.get(name, [])} - {"hetstep"}
    needed -= {canonicalize_name(Requirement(line).name) for line in metadata.requires("pydantic")}  # pip installs them with it
    assert {"omegaconf", "psutil"} <= needed <= submit.keys()


def test_both_images_have_one_nccl_and_each_base_is_pinned():
    texts = [(CONTAINERS / kind / "Dockerfile").read_text() for kind in KINDS]
    (nccl,) = {re.search(r"^ARG NCCL_VERSION=([\d.]+)$", text, re.M)[1] for text in texts}
    assert nccl
    for kind, text in zip(KINDS, texts, strict=True):
        base = re.search(r"^ARG BASE=(\S+)$", text, re.M)[1]
        assert re.fullmatch(r"[a-z.]+/\S+:v?[\d.]+(-py3)?", base) and "latest" not in base
        assert f'install.sh {kind} "${{NCCL_VERSION}}"' in text
        instructions = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
        assert instructions == ["ARG", "ARG", "FROM", "ARG", "RUN", "ENV", "ENV", "ENV", "ENTRYPOINT"]


def test_both_images_have_one_network_plugin():
    """NCCL's ranks cannot connect if only one has loaded a plugin or sees InfiniBand."""
    for kind in KINDS:
        text = (CONTAINERS / kind / "Dockerfile").read_text()
        variables = dict(re.findall(r"^ENV (\w+)=(\S+)$", text, re.M))
        variables.pop("PATH")
        assert variables == {"NCCL_NET_PLUGIN": "none", "MELLANOX_VISIBLE_DEVICES": "all"}
    installed = (CONTAINERS / "install.sh").read_text()
    assert "rdma-core libibverbs1 ibverbs-providers" in installed.partition("else # NVIDIA")[2]


NVIDIAS = {"torch": "2.13.0a0+1b2c3d4.nv26.07", "git": "1b2c3d4", "CUDA": "13.2", "NCCL": "2.30.7"}
PYPIS = {"torch": "2.13.0+cu130", "git": "5e6f7a8", "CUDA": "13.0", "NCCL": "2.30.7"}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"NCCL": "2.27.5"}, ["NCCL"]),
        ({"torch": "2.13.1+cu130"}, ["torch"]),
        ({"torch": "2.13.0+cu128", "CUDA": "12.8"}, ["CUDA"]),
    ],
)
def test_whole_builds_are_compared(changes, wrong):
    found, notes = differences(NVIDIAS, PYPIS | changes)
    assert named(found) == {(name, "wrong-version") for name in wrong}
    assert [note.partition(":")[0] for note in notes] == ([] if wrong else ["torch", "git", "CUDA"])
    assert differences(PYPIS, PYPIS) == ([], [])


def test_the_other_image_s_record_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("containers.check_image.problems", lambda kind, nccl: [])
    monkeypatch.setattr("containers.check_image.build", lambda: NVIDIAS)
    own, other = tmp_path / "build.json", tmp_path / "other.json"
    assert main("train", "2.30.7", str(own), str(other)) == 0  # the first of the two
    assert json.loads(own.read_text()) == NVIDIAS
    other.write_text(json.dumps(PYPIS))
    assert main("train", "2.30.7", str(own), str(other)) == 0
    assert "note: torch: 2.13.0a0+1b2c3d4.nv26.07 here, 2.13.0+cu130 in the other image\n" in capsys.readouterr().out
    other.write_text(json.dumps(PYPIS | {"NCCL": "2.27.5"}))
    own.unlink()
    assert main("train", "2.30.7", str(own), str(other)) == 1
    assert "NCCL: 2.30.7 here" in capsys.readouterr().out and not own.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_without_what_kernels_need_is_refused(kind, monkeypatch):
    assert list(kernel_problems(kind)) == []
    monkeypatch.setattr(torch_features, "lacking", lambda: ["torch.nn.attention.varlen.varlen_attn"])
    monkeypatch.setattr(c_compiler, "missing", lambda: c_compiler.HEADER)
    of_train = {("torch", "wrong-version")} if kind == "train" else set()
    assert named(kernel_problems(kind)) == {*of_train, ("triton", "not-installed")}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_s_check_finds_the_faults_of_this_environment(kind):
    """This environment is not an image: its PyTorch is built for CPUs.

    Everything that the set pins is installed, and ranks' imports work.
    """
    found = [problem.key for problem in problems(kind, "2.30.7")]
    here = {f"lib{name}.so.1" for name in ("ibverbs", "mlx5") if ctypes.util.find_library(name)}
    assert [name for name in found if name not in here] == [
        *RELEASES[kind],
        "torch",
        *(name for name in ("libibverbs.so.1", "libmlx5.so.1") if name not in here),
    ]


# ---- build.sh -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def build(tmp_path):
    """Return a function (kind, installed programs, variables) -> (status, calls). The programs only record their calls."""
    log = tmp_path / "commands"
    (tmp_path / "out").mkdir()

    def call(kind: str, *programs: str, **variables: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        tools = tmp_path / "bin"
        tools.mkdir()
        for program in programs:
            lines = f'echo "{program} $*" >>{log}\n[[ $3 != *.def ]] || cat $3 >>{log}\n[[ $1 != ${{FAIL:-}} ]]\n'
            (tools / program).write_text(f"#!/bin/bash\n[[ $1 == info ]] && exit ${{NO_DAEMON:-0}}\n{lines}")
            (tools / program).chmod(0o755)
        for program in ("bash", "cat", "sed", "mktemp", "rm", "cp", "dirname"):
            (tools / program).symlink_to(Path("/usr/bin", program))
        command = [str(CONTAINERS / "build.sh"), kind, str(tmp_path / "out")]
        environment = {"PATH": str(tools), "TMPDIR": str(tmp_path), **variables}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True)
        return answer, log.read_text().splitlines() if log.exists() else []

    return call


SQUASH = ("mksquashfs", "unsquashfs")


def test_docker_builds_and_enroot_imports(build, tmp_path):
    answer, (built, _, imported) = build("train", "docker", "enroot", *SQUASH, BASE_DIGEST="@sha256:12")
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"^docker build --file \S+/containers/train/Dockerfile --tag hetstep-train-0\.1\.0 ", built)
    assert "BASE=nvcr.io/nvidia/pytorch:26.07-py3@sha256:12 --build-arg NCCL_VERSION=2.30.7" in built
    image = tmp_path / "out/hetstep-train-0.1.0.sqsh"
    assert imported == f"enroot import --output {image} dockerd://hetstep-train-0.1.0"
    assert f"cluster.train.container_image={image}" in answer.stdout


def test_without_a_docker_daemon_enroot_builds_and_imports(build):
    answer, commands = build("generate", "docker", "enroot", *SQUASH, NO_DAEMON="1")
    assert answer.returncode == 0, answer.stderr
    assert [command.split()[1] for command in commands] == ["import", "create", "start", "start", "export", "remove"]
    assert commands[0].endswith(" docker://vllm/vllm-openai:v0.32.0")
    variables = "NCCL_NET_PLUGIN=none MELLANOX_VISIBLE_DEVICES=all"
    assert commands[2].endswith(f"hetstep-generate-0.1.0 /hetstep/containers/install.sh generate 2.30.7 {variables}")
    assert commands[3] == "enroot start hetstep-generate-0.1.0 cat /opt/hetstep/build.json"


def test_apptainer_builds_where_there_is_no_enroot(build, tmp_path):
    answer, (built, *definition, started) = build("train", "docker", "apptainer", BASE_DIGEST="@sha256:12")
    assert answer.returncode == 0, answer.stderr
    image = tmp_path / "out/hetstep-train-0.1.0.sif"
    assert built.startswith(f"apptainer build {image} ") and f"cluster.train.container_image={image}" in answer.stdout
    assert definition[:2] == ["Bootstrap: docker", "From: nvcr.io/nvidia/pytorch@sha256:12"]
    assert "    /hetstep/containers/install.sh train 2.30.7" in definition
    variables = "NCCL_NET_PLUGIN=none MELLANOX_VISIBLE_DEVICES=all"
    assert definition[-1] == f"    export PATH=/opt/hetstep/bin:$PATH {variables}"
    assert started == f"apptainer exec {image} cat /opt/hetstep/build.json"


@pytest.mark.parametrize(
    ("kind", "programs", "variables", "says"),
    [
        ("trian", ("docker", "enroot", *SQUASH), {}, "containers/build.sh train|generate [FOLDER]"),
        ("train", ("docker",), {}, "there is no enroot here, which makes .sqsh files"),
        ("train", ("docker", "enroot"), {}, "enroot needs mksquashfs: install squashfs-tools"),
        ("train", ("docker", "enroot", *SQUASH), {"FAIL": "build"}, "docker could not build hetstep-train"),
        ("train", ("enroot", *SQUASH), {"FAIL": "import"}, "enroot could not fetch nvcr.io/nvidia/pytorch:26.07-py3"),
        ("train", ("docker", "apptainer"), {"FAIL": "build"}, "apptainer could not build"),
        ("train", ("enroot", *SQUASH), {"TOOL": "podman"}, "TOOL=podman: there is no such program here"),
    ],
)
def test_missing_programs_are_named(build, kind, programs, variables, says):
    answer, _ = build(kind, *programs, **variables)
    assert answer.returncode != 0
    assert says in answer.stderr

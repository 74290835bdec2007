"""What Triton compiles with is missed before a kernel is compiled: by preflight, and by `make setup`."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from launch import submit
from launch.preflight import installed
from pipeline import config
from pipeline.node import c_compiler
from tests.launch.model import write_recipe

ROOT = Path(__file__).parent.parent
GPUS = ("cluster.train.gpus_per_node=1", "cluster.generate.gpus_per_node=1")
VLLM, MEGATRON = "policy.generation.backend=vllm", "policy.megatron_cfg.enabled=true"


@pytest.fixture
def no_header(monkeypatch, tmp_path):
    """Let this Python have no Python.h, as Debian's without python3-dev."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path / "include")})


def test_a_compiler_and_the_header_are_missed(monkeypatch, no_header, tmp_path):
    assert c_compiler.missing() == c_compiler.HEADER
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert c_compiler.missing() == c_compiler.COMPILER


def test_debians_scheme_for_local_packages_is_not_where_headers_are(monkeypatch):
    """As of /usr/bin/python3, outside of a virtual environment."""
    real = sysconfig.get_paths
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"} if scheme == "posix_local" else real(scheme)
    )
    assert c_compiler.missing() is None


@pytest.mark.parametrize("variable", ["CPATH", "C_INCLUDE_PATH"])
def test_the_compiler_may_find_the_header_elsewhere(variable, monkeypatch, no_header, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv(variable, str(tmp_path))
    assert c_compiler.missing() is None


def test_a_compiler_that_the_user_named_must_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert c_compiler.missing() == c_compiler.COMPILER


@pytest.mark.parametrize(
    ("overrides", "components"),
    [
        ((*GPUS, VLLM), ["generate"]),
        ((*GPUS, "policy.generation.backend=transformers", MEGATRON), ["train"]),
        ((*GPUS, VLLM, MEGATRON, "policy.megatron_cfg.bias_activation_fusion=false"), ["generate"]),
        ((*GPUS, VLLM, "cluster.generate.python=/opt/other/bin/python"), []),
        ((VLLM, MEGATRON), []),
    ],
    ids=["vLLM", "Megatron-Core", "without fusion", "another python", "without GPUs"],
)
def test_preflight(overrides, components, no_header, tmp_path):
    found = list(installed.compiler_problems(config.load(str(write_recipe(tmp_path)), overrides)))
    assert [problem.key for problem in found] == [f"cluster.{name}.gpus_per_node" for name in components]
    assert all(f"there is no {c_compiler.HEADER}. Install it" in problem.message for problem in found)


def test_preflight_of_a_local_run(no_header, tmp_path, capsys):
    assert submit.main([f"recipe={write_recipe(tmp_path)}", "cluster.executor=local", *GPUS, VLLM]) == 2
    assert "cluster.generate.gpus_per_node: got 1; generate ranks compile" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", [True, False])
def test_make_setup_names_what_is_missing(gpu, tmp_path):
    """On a machine with a GPU, and without a C compiler."""
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, program in {"nvidia-smi": "/bin/true", "sh": "/bin/sh"}.items():
        if gpu or name != "nvidia-smi":
            (tmp_path / "bin" / name).symlink_to(program)
    (tmp_path / ".venv/bin/python").write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} "$@"\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path / "bin")}
    make = [shutil.which("make"), "--file", ROOT / "Makefile", "--old-file=.venv/ready", "--old-file=slurm", "setup"]
    printed = subprocess.run(make, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert (c_compiler.COMPILER in printed) == gpu

"""`make gpu-check` without a GPU: Makefile, table, and, on the CPU at tiny sizes, the whole check."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_check import parts, table
from tests.gpu_check.samples import place, written
from tests.gpu_check.table import CUT, FAILED, LEFT_OUT, PASSED, Result

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.gpu_check"]
NAMES = [part.name for part in parts.every(place(Path("/tmp")))]


@pytest.mark.parametrize(
    ("given", "ready", "gpus", "chosen"),
    [
        ("", True, ".venv python3", ".venv"),
        ("", True, "python3", "python3"),
        ("", True, ".venv", ".venv"),
        ("", True, "", ".venv"),
        ("", False, ".venv python3", "python3"),
        ("command line", True, ".venv python3", "python3"),
        ("environment", True, ".venv python3", "python3"),
    ],
)
def test_make_chooses_a_python_that_finds_a_gpu(tmp_path, given, ready, gpus, chosen):
    """gpus: the Pythons whose torch finds a GPU. Programs that print their name stand in for them."""
    for name, path in ((".venv", tmp_path / ".venv/bin/python"), ("python3", tmp_path / "python3")):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = int(name not in gpus.split())
        path.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then exit {found}; fi\necho {name} "$@"\n')
        path.chmod(0o755)
    if ready:
        (tmp_path / ".venv/ready").touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    if given == "environment":
        environment["PYTHON"] = "python3"
    command = ["make", "-s", "-f", ROOT / "Makefile", "gpu-check", *(["PYTHON=python3"] if given == "command line" else [])]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == [chosen, "-m", "tests.gpu_check"], answer.stderr


def test_the_page_has_every_part_and_outcome():
    """The rows of its tables begin with outcomes and with the first words of the parts' names."""
    page = (ROOT / "tests/gpu_check/README.md").read_text()
    rows = {name for line in page.splitlines() if line.startswith("| ") for name in line.split(" | ")[0][2:].split(", ")}
    kinds = {re.match(r"\w+", name)[0] for name in NAMES}
    assert rows == {"outcome", "part", PASSED, FAILED, CUT, LEFT_OUT} | kinds


def test_the_table():
    machine = {"gpus": ["H100", "H100"], "cuda": "13.0", "versions": {"torch": "2.13.0", "vllm": None}}
    results = [
        Result("train: FSDP2", PASSED, "n", {"tokens/s": 12345.678, "MFU": None}, seconds=12.3),
        Result("decode: vllm", LEFT_OUT, "not installed: vllm"),
        Result("refit: group", FAILED, " ".join(["word"] * 25)),
    ]
    assert table.text(machine, results).splitlines() == [
        "",
        "2 H100; CUDA 13.0; torch 2.13.0, vllm none",
        "",
        "part                     s",
        "train: FSDP2  passed    12  tokens/s 1.235e+04; n",
        "decode: vllm  left out   0  not installed: vllm",
        "refit: group  failed     0  " + " ".join(["word"] * 20),
        "                            " + " ".join(["word"] * 5),
        "",
        "1 passed, 1 failed, 1 left out",
    ]


@pytest.mark.full
def test_a_minute_on_the_cpu(tmp_path):
    """Parts that do not fit are left out by name."""
    answer = subprocess.run(
        [*PROGRAM, "device=cpu", "size=tiny", "total=60", f"out={tmp_path}/out.json"], cwd=ROOT, capture_output=True, text=True
    )
    found = written(tmp_path / "out.json")
    assert list(found) == NAMES, answer.stdout[-5000:]
    assert "no time (needs about " in found["train: FSDP2"]["note"]
    assert re.search(r"^train: FSDP2 +left out", answer.stdout, re.M), answer.stdout[-5000:]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_whole_check_on_the_cpu(tmp_path):
    command = [*PROGRAM, "device=cpu", "size=tiny", "total=3500", f"out={tmp_path}/out.json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-5000:]
    found = written(tmp_path / "out.json")
    assert list(found) == NAMES
    for name, result in found.items():
        assert result["outcome"] == (LEFT_OUT if name.startswith("tests: ") else PASSED), name
        assert "no time" not in result["note"] and "not installed" not in result["note"]
    for name in ("train: FSDP2 eager", "train: FSDP2", "train: Megatron-Core", "decode: vllm", "decode: transformers"):
        assert found[name]["numbers"]["tokens/s"] > 0
    assert found["train: FSDP2"]["numbers"]["graphs"] > 0 == found["train: FSDP2"]["numbers"]["graphs of other packings"]
    assert all(found["refit: shared GPU"]["numbers"][f"{kind} GB/s"] > 0 for kind in ("IPC", "host", "delta"))

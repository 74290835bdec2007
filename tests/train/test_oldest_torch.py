"""Train ranks run on the oldest PyTorch that they support, in a virtual environment of its own.

It is made once, in ${XDG_CACHE_HOME:-~/.cache}/hetstep (delete it to have newer packages), and takes 6 GB, because this PyTorch
is built for CUDA. Its transformers is as old, older than pyproject.toml allows, so tests of newer models are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = {"torch": "torch==2.11.0", "transformers": "transformers==5.17.0"}
TESTS = (
    *("tests/test_torch_features.py", "tests/device", "tests/train/test_attention.py", "tests/train/test_flex_attention.py"),
    *("tests/train/test_compiled.py", "tests/train/test_fsdp.py", "tests/train/test_layouts.py"),
)
SOME = "tp2-sp or not test_layout"  # of the layouts, sequence parallelism: it was once written for newer DTensors

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def packages() -> list[str]:
    """Return pyproject.toml's dependencies with the pins, and pytest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    testers = [line for line in project["optional-dependencies"]["dev"] if line.startswith("pytest")]
    own = [line for line in project["dependencies"] if not line.startswith(tuple(PINS))]
    return [*PINS.values(), *own, *testers]


def base_python() -> str:
    """Return a Python 3.12, which machines with this PyTorch have; this Python if there is none."""
    found = [shutil.which("python3.12"), *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python"))]
    for python in filter(None, found):  # pyenv's shim may refuse to start
        if subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return python
    return sys.executable


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Return the Python of the environment. Skips if pip reaches no registry."""
    base = base_python()
    digest = hashlib.sha256("\n".join([base, *packages()]).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetstep"
    path = cache / f"torch-2.11-{digest}"
    if not path.exists():
        answer = _pip(Path(base), "download", "--no-deps", "--dest", tmp_path_factory.mktemp("wheel"), "typing_extensions")
        if answer.returncode:
            pytest.skip(f"pip of {base} reaches no registry: {answer.stderr.strip().splitlines()[-1]}")
        partial = cache / f".{path.name}.{os.getpid()}"
        try:
            subprocess.run([base, "-m", "venv", partial], check=True)
            answer = _pip(partial / "bin/python", "install", *packages())
            assert answer.returncode == 0, answer.stderr[-3000:]
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path / "bin/python"


def _pip(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VIRTUAL_ENV"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_gpu_check_trains_and_decodes(python, tmp_path):
    out = tmp_path / "gpu_check.json"
    answer = run(python, "tests.gpu_check", "device=cpu", "size=tiny", "parts=train,decode", "total=3000", f"out={out}")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    outcomes = {result["part"]: result["outcome"] for result in json.loads(out.read_text())["results"]}
    assert outcomes.pop("decode: vllm") == "left out"  # it is not installed
    assert len(outcomes) >= 4 and set(outcomes.values()) == {"passed"}, outcomes


def test_its_attention_compiler_and_tensors_do_what_train_ranks_need(python):
    options = ("-q", "-p", "no:cacheprovider", "-m", "not gpu and not long and (not full or full)", "-k", SOME)
    answer = run(python, "pytest", *options, *TESTS)
    assert answer.returncode == 0, answer.stdout[-6000:]

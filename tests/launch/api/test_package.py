"""`hetstep` is importable from a wheel and from an editable install."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from launch.executors.executor import ROOT

pytestmark = pytest.mark.full
PROGRAM = """
import sys
import hetstep, launch.submit, pipeline.config
assert "torch" not in sys.modules
print(hetstep.__file__)
print(hetstep.plan(sys.argv[1]).steps)
"""


def python_of(folder: Path) -> Path:
    """Return the Python of a new environment that sees the packages of this one, but none of its editable installs."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin/python"


def install(python: Path, *arguments: str) -> None:
    """Install into the environment of a Python, with this one's pip and without a network."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--quiet", *arguments], check=True, timeout=300)


def imported(python: Path, cwd: Path) -> tuple[Path, int]:
    """Return (the file of hetstep, the steps of a plan) in a process that sees no checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", PROGRAM, str(ROOT / "recipes/tiny_sft.yaml")]
    file, steps = subprocess.check_output(command, cwd=cwd, env=environment, text=True, timeout=300).split()
    return Path(file), int(steps)


def copy_of_checkout(folder: Path) -> Path:
    """Return a copy of what an installation reads, so that none of its files end up in the checkout."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "launch", "pipeline", "recipes"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    return folder


def test_a_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(tmp_path), str(copy_of_checkout(source))], check=True, timeout=300)
    (wheel,) = tmp_path.glob("hetstep-*.whl")
    python = python_of(tmp_path / "venv")
    install(python, str(wheel))
    file, steps = imported(python, tmp_path)
    assert file.is_relative_to(tmp_path / "venv") and file.with_name("py.typed").exists() and steps == 350


def test_an_editable_install(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    python = python_of(tmp_path / "venv")
    install(python, "--editable", str(copy_of_checkout(source)))
    file, steps = imported(python, tmp_path)
    assert file == source / "launch/api/hetstep/__init__.py" and steps == 350

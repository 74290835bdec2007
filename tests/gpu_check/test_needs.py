"""Each part names all packages that it imports: it runs where nothing else is installed."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu_check import parts
from tests.gpu_check.samples import place, written
from tests.gpu_check.table import LEFT_OUT, PASSED

ROOT = Path(__file__).parents[2]
NEEDS = {part.name: part.needs for part in parts.every(place(Path("/tmp")))}
INSTALLED_WHOLE = ("torch", "transformers", "peft", "pytest", "tensorboard")
"""Packages that come with what they need."""
HIDES = """
import os, sys
from importlib.machinery import PathFinder

HIDDEN = set(os.environ["HIDDEN"].split(","))


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def with_requirements(packages: set[str]) -> set[str]:
    """Return the distributions of these, and those that they require."""
    seen: set[str] = set()
    waiting = sorted(packages)
    while waiting:
        name = canonicalize_name(waiting.pop())
        try:
            requirements = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        if name not in seen:
            seen.add(name)
            waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return seen


def others(needs: tuple[str, ...]) -> set[str]:
    """Return the installed modules that a part must not import if these are all that it needs."""
    owners, tops = metadata.packages_distributions(), {name.partition(".")[0] for name in needs}
    whole = with_requirements({name for name in INSTALLED_WHOLE if name in tops})
    ours = {"pipeline", "launch", "recipes", "hetstep", "tests"}
    ours |= {path.name for path in (Path(setuptools.__file__).parent / "_vendor").iterdir()}  # setuptools brings these itself
    return {module for module, by in owners.items() if not whole & {canonicalize_name(name) for name in by}} - tops - ours


WITHOUT_VLLM = [name for name, needs in NEEDS.items() if "vllm" not in needs or name.startswith("run")]


@pytest.mark.parametrize(
    "name", [name if name == "attention" else pytest.param(name, marks=pytest.mark.full) for name in WITHOUT_VLLM]
)
@pytest.mark.timeout(1300)
def test_a_part_needs_no_package_that_it_does_not_name(name, tmp_path):
    """It runs, alone, where nothing else is installed. Where vLLM is missing, runs sample with transformers."""
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    hidden = others(tuple(need for need in NEEDS[name] if need != "vllm"))
    assert {"vllm", "datasets" if not name.startswith("run") else "plotly"} <= hidden
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "HIDDEN": ",".join(hidden), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.gpu_check",
        "device=cpu",
        "size=tiny",
        "total=1200",
        f"parts={name}",
        f"out={tmp_path}/out.json",
    ]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    result = written(tmp_path / "out.json")[name]
    expected = LEFT_OUT if name.startswith("tests: ") else PASSED
    assert (result["outcome"], "not installed" in result["note"]) == (expected, False), answer.stdout[-5000:]

"""Imports run downhill only, and the submit path never reaches torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each line may import from its own part and from the lines below it. Parts on one line do not know each other.
DOWNHILL = [
    ("main",),
    ("coordinator",),
    ("experience", "scoring"),
    ("roles",),
    ("rollout", "refit"),
    ("algorithms", "train", "generate", "environments", "remote"),
    ("watchdog", "metrics"),
    ("world", "checkpoint", "data", "models"),
    ("config", "types", "boxes"),
]
LEVEL = {part: level for level, parts in enumerate(DOWNHILL) for part in parts}


def imports(path: Path) -> list[str]:
    """Modules that a file imports, anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" if node.module == "pipeline" else node.module for alias in node.names]
    return found


def part(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", sorted(ROOT.glob("pipeline/**/*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_pipeline_imports_run_downhill(path):
    if path == ROOT / "pipeline/__init__.py":
        return
    own = path.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")
    for module in imports(path):
        assert not module.startswith("launch"), f"{module}: the pipeline does not know the launcher"
        if module.startswith("pipeline."):
            other = part(module)
            assert other == own or LEVEL[own] < LEVEL[other], f"{own} must not import {module}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("launch/*.py")), ids=lambda path: path.name)
def test_launch_imports_only_the_recipe(path):
    for module in imports(path):
        assert module.split(".")[0] not in ("torch", "transformers", "vllm"), f"{module}: a login node must answer at once"
        if module.startswith("pipeline.") and path.name not in ("task.py", "export.py", "plan_refit.py"):
            assert part(module) in ("config",), f"{module} is not for the submit path"

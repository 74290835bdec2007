"""Imports run downhill and in no circle, and the submit path never imports torch."""

import ast
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from pipeline.config import GENERATED_DATASETS, KINDS

ROOT = Path(__file__).parent.parent
# Each line may import from its own part and from the lines below it. Parts on one line do not import each other.
DOWNHILL = [
    ("main",),
    ("coordinator",),
    ("evaluation",),
    ("scoring", "deadline", "colocation", "monitor", "steering", "tracking"),
    ("roles",),
    ("rollout", "refit"),
    ("train", "generate", "environments", "rpc", "node_checks"),
    ("watchdog", "metrics", "rollout_metrics", "verification"),
    ("world", "checkpoint", "data", "models", "attempt", "tensorboard_writer", "steer_files", "environment_names"),
    ("config", "store"),
    ("algorithms", "trackers"),
    ("types", "boxes"),
    ("lineage",),
    ("digests", "small_files"),
    (
        "builds",
        "c_compiler",
        "caches",
        "encoding",
        "memory_kills",
        "network_interface",
        "storage",
        "signals",
        "startup",
        "timeline",
        "torch_features",
        "sandbox",
        "user_code",
        "rank_log",
        "warning_file",
    ),
    ("encryption",),
    ("secrets", "spans", "user_files"),
    ("problems", "values"),
    ("problem_codes",),
]
HEAVY = ("torch", "transformers", "vllm", "megatron", "datasets", "tensorboard")
LEVEL = {part: level for level, parts in enumerate(DOWNHILL) for part in parts}


def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, anywhere in it."""
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


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle in the graph, empty if there is none."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := follow(other, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := follow(module, []))), [])


def test_no_modules_import_each_other():
    """Imports inside functions count, and so do those for type annotations alone."""
    paths = {_module(path): path for folder in ("pipeline", "launch") for path in ROOT.glob(f"{folder}/**/*.py")}
    graph = {module: set(_imported(path, paths)) - {module} for module, path in paths.items()}
    for registry, names in (("pipeline.config.environments", KINDS), ("pipeline.data.datasets", GENERATED_DATASETS)):
        graph[registry] |= {dotted.rpartition(".")[0] for dotted in names.values()}  # these names import them
    assert len(graph) > 300 and not _cycle(graph)


def test_algorithms_do_not_import_their_registry():
    """The registry imports them by name, which `_imported` does not see."""
    files = set(ROOT.glob("pipeline/algorithms/*.py")) - {ROOT / "pipeline/algorithms/__init__.py"}
    assert len(files) > 10 and not [path.name for path in files if "pipeline.algorithms" in imports(path)]


def test_a_cycle_is_found():
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, modules: Container[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else node.module for name in names if name in modules or node.module in modules)


LAUNCH = sorted(ROOT.glob("launch/**/*.py"))
IN_THE_JOB = ("task.py", "export.py")  # these run where torch is installed
LEFT_OUT = (*IN_THE_JOB, "study.py")  # the package of the latter, Optuna, need not be installed


@pytest.mark.parametrize("path", LAUNCH, ids=lambda path: str(path.relative_to(ROOT)))
def test_launch_imports_no_library_of_the_job(path):
    for module in imports(path):
        assert module.split(".")[0] not in HEAVY, f"{module}: a login node need not have it"


def test_launch_runs_without_the_libraries_of_the_job():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LAUNCH if path.name not in LEFT_OUT]
    program = f"""
import importlib, sys
sys.modules |= dict.fromkeys({HEAVY})
for module in {modules}:
    importlib.import_module(module.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)

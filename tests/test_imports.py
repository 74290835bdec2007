"""Imports run downhill and in no circle, and the submit path never imports torch."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import GENERATED_DATASETS, KINDS

ROOT = Path(__file__).parent.parent
# A room is a package or a module at the top of `pipeline/` or `launch/`. Each line is a floor: a room imports from itself and
# from the floors below it, also inside functions. Rooms of one floor do not import each other. `launch` imports from any room
# of `pipeline`, which knows nothing of `launch`.
FLOORS = {
    "pipeline": [
        ("main",),
        ("coordinator", "evaluation"),
        ("coordination",),
        ("steering",),
        ("roles",),
        ("rollout",),
        ("monitor", "node_checks", "refit", "rpc"),
        ("environments", "generate", "job", "tracking", "train"),
        ("checkpoints", "data", "models", "observe"),
        ("config", "encryption", "lineage", "store"),
        ("files",),
        ("algorithms", "node", "trackers"),
        ("seams",),
        ("recipe", "sandbox", "boxes", "types"),
    ],
    "launch": [
        ("audit", "hetstep_sbatch", "lineage", "registry", "serve"),
        ("serving",),
        ("api",),
        ("bundle", "contamination", "evaluate", "export", "index_corpus", "plan_refit", "report"),
        ("status", "steer", "submit", "sweep", "timeline", "track"),
        ("sweeps",),
        ("evaluations",),
        ("governance",),
        ("submission",),
        ("pages", "plan"),
        ("drawing",),
        ("runs",),
        ("preflight",),
        ("executors",),
        ("recipes",),
        ("terminal",),
    ],
}
FLOOR = {tree: {room: floor for floor, rooms in enumerate(floors) for room in rooms} for tree, floors in FLOORS.items()}
PATHS = sorted(path for tree in FLOORS for path in ROOT.glob(f"{tree}/**/*.py"))
PARTS_OF_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
HEAVY = ("torch", "transformers", "vllm", "megatron", "datasets", "tensorboard")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PATHS}


@functools.cache
def statements(path: Path, annotations: bool = False) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports anywhere in a file. annotations: also those of annotations alone (`if TYPE_CHECKING:`)."""
    found, waiting = [], [*ast.parse(path.read_text()).body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.Import) or node.level == 0, f"{path}: relative import"
            found.append(node)
        elif annotations or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += [below for below in ast.iter_child_nodes(node) if isinstance(below, PARTS_OF_STATEMENTS)]
    return found


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports. `from package import module` is the import of a module too."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if name in MODULES]
            yield from modules
            if len(modules) < len(names):
                yield node.module


def uphill(path: Path) -> Iterator[str]:
    """Yield a line for each import of a file that runs uphill or stays on its floor."""
    tree, *rooms = module_of(path).split(".")
    for module in imports(path) if rooms else ():  # neither pipeline/__init__.py nor launch/__init__.py
        to, *names = module.split(".")
        if (tree, to) == ("pipeline", "launch"):
            yield f"{path}: the pipeline does not know the launcher, but imports {module}"
        elif to == tree and names[0] != rooms[0] and FLOOR[tree][rooms[0]] >= FLOOR[tree][names[0]]:
            yield f"{path}: {rooms[0]} must not import {module}"


def test_imports_run_downhill():
    assert len(PATHS) > 500 and not [fault for path in PATHS for fault in uphill(path)]


def test_every_room_has_a_floor():
    for tree in FLOORS:
        rooms = {module.split(".")[1] for module in MODULES if module.startswith(f"{tree}.")}
        assert rooms == set(FLOOR[tree]), tree


def test_no_package_has_one_file_and_no_two_files_one_name():
    names = Counter(path.name for path in PATHS if path.name != "__init__.py")
    assert len(names) > 500 and {name for name, count in names.items() if count > 1} == {
        "evaluate.py"
    }  # a command and its section
    sizes = Counter(path.parent for path in PATHS if path.name != "__init__.py")
    assert len(sizes) > 25 and not [str(folder) for folder, count in sizes.items() if count < 2]


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle in the graph, empty if there is none."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if cycle := follow(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := follow(module, []))), [])


def test_no_modules_import_each_other():
    graph = {module: {name for name in imports(path) if name in MODULES} - {module} for module, path in MODULES.items()}
    for registry, names in (("pipeline.config.environments", KINDS), ("pipeline.data.datasets", GENERATED_DATASETS)):
        graph[registry] |= {dotted.rpartition(".")[0] for dotted in names.values()}  # these names import them
    assert len(graph) > 500 and not _cycle(graph)


def test_algorithms_do_not_import_their_registry():
    """The registry imports them by name, which `imports` does not see."""
    files = set(ROOT.glob("pipeline/algorithms/*.py")) - {ROOT / "pipeline/algorithms/__init__.py"}
    assert len(files) > 10 and not [path.name for path in files if "pipeline.algorithms" in imports(path)]


def test_a_cycle_is_found():
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


LAUNCH = [path for path in PATHS if path.is_relative_to(ROOT / "launch")]
IN_THE_JOB = ("rank_task.py", "export.py")  # these run where torch is installed
LEFT_OUT = (*IN_THE_JOB, "study.py")  # the package of the latter, Optuna, need not be installed


def test_launch_imports_no_library_of_the_job():
    """A login node need not have them."""
    assert len(LAUNCH) > 200
    assert not [str(path) for path in LAUNCH if {module.split(".")[0] for module in imports(path)} & {*HEAVY}]


def test_launch_runs_without_the_libraries_of_the_job():
    modules = [module_of(path) for path in LAUNCH if path.name not in LEFT_OUT]
    program = f"""
import importlib, sys
sys.modules |= dict.fromkeys({HEAVY})
for module in {modules}:
    importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)

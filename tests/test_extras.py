"""The core trains where the folders of extras are missing, imports none of them, and names the one that a key asks for."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from pipeline.seams.extras import EXTRAS
from tests.test_imports import HEAVY, IN_THE_JOB, ROOT, imports, statements

FILES = sorted(path for folder in ("pipeline", "launch") for path in ROOT.glob(f"{folder}/**/*.py"))
UNITS = {extra.paths: name for name, extra in reversed(EXTRAS.items())}  # extras that share their files are one


@functools.cache
def _extra_of(path: Path) -> str | None:
    """Return the name of the extra that a file is of."""
    within = [path, *path.parents]
    return next((name for paths, name in UNITS.items() if any(ROOT / each in within for each in paths)), None)


@functools.cache
def _files_of(module: str) -> Path:
    base = ROOT / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _names(path: Path) -> list[str]:
    """Return the modules that a file imports, and names that may be modules of them."""
    return [*imports(path), *(f"{module}.{name}" for module, name in _from(path))]


def _from(path: Path) -> list[tuple[str, str]]:
    found = [node for node in statements(path, annotations=True) if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), alias.name) for node in found for alias in node.names]


def test_every_path_of_an_extra_exists():
    missing = [path for extra in EXTRAS.values() for path in extra.paths if not (ROOT / path).exists()]
    assert not missing


def test_the_core_imports_no_extra():
    """Imports inside functions count."""
    core = [path for path in FILES if _extra_of(path) is None]
    imported = [(str(path), name) for path in core for name in _names(path) if _extra_of(_files_of(name))]
    assert len(core) > 500 and not imported


def test_an_import_of_an_extra_is_seen():
    found = {
        name: _extra_of(_files_of(name))
        for name in ("pipeline.encryption.key", "launch.sweeps.suite", "pipeline.checkpoints.checkpoint")
    }
    assert list(found.values()) == ["encryption", "sweeps", None]


# ---- without their files ------------------------------------------------------------------------------------------------


def _copy_without(folder: Path, removed: list[tuple[str, ...]]) -> Path:
    """Return a copy of the repository's code and recipes without the paths of extras."""
    for part in ("pipeline", "launch", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.pyc.*"))  # which other workers write
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in (folder / each for paths in removed for each in paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # A Python with the packages of this one, but without the finder of an editable install, which would find what is removed.
    environment = folder / ".venv"
    venv.create(environment, symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(packages, "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(folder / ".venv/bin/python"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, env=_environment())


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1"}


def _submit(folder: Path, recipe: str, *overrides: str) -> subprocess.CompletedProcess:
    return _python(folder, "launch/submit.py", f"recipe={recipe}", "cluster.executor=local", *overrides)


def _train(folder: Path) -> None:
    """Train tiny_sft, from which tiny_grpo starts, and tiny_grpo, for a step each."""
    for recipe, steps in (("tiny_sft", "sft.max_num_steps=1"), ("tiny_grpo", "grpo.max_num_steps=1")):
        ended = _submit(folder, recipe, steps)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        run = folder / "runs" / recipe
        assert (run / "done.json").exists() and (run / "checkpoints/step_000001/complete.json").exists()


def _extras_away(folder: Path) -> list[str]:
    """Import each module of a copy's launcher but its extras, without torch, and return the extras that it does not have."""
    core = [path.relative_to(ROOT) for path in FILES if _extra_of(path) is None and path.name not in IN_THE_JOB]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in core if path.parts[0] == "launch"]
    program = f"""
import importlib, sys
sys.path.insert(0, ".")
sys.modules |= dict.fromkeys({HEAVY})
for module in {modules}:
    importlib.import_module(module)
from pipeline.seams import extras
print(*[name for name, extra in extras.EXTRAS.items() if extra.module and not extras.is_here(name)])
"""
    ended = _python(folder, "-c", program)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy without any extra."""
    return _copy_without(tmp_path_factory.mktemp("bare") / "copy", list(UNITS))


def test_commands_import_without_extras(bare):
    """With all of them away: what a command needs of the core is there without any of them."""
    assert _extras_away(bare) == [name for name, extra in EXTRAS.items() if extra.module]


@pytest.mark.full
@pytest.mark.parametrize(("paths", "name"), UNITS.items(), ids=UNITS.values())
def test_commands_import_without_an_extra(paths, name, tmp_path):
    away = _extras_away(_copy_without(tmp_path / "copy", [paths]))
    assert (name in away) == (EXTRAS[name].module is not None)


@pytest.mark.full
def test_the_core_trains_without_extras(bare):
    _train(bare)
    assert not list(bare.glob("runs/*/lineage")) and not list(bare.glob("**/audit.jsonl"))


@pytest.mark.long
@pytest.mark.parametrize(("paths", "name"), UNITS.items(), ids=UNITS.values())
def test_the_core_trains_without_an_extra(paths, name, tmp_path):
    _train(_copy_without(tmp_path / "copy", [paths]))


@pytest.mark.parametrize(
    ("override", "extra"),
    [
        ("checkpointing.encryption.key_file=/nowhere/key", "encryption"),
        ("cluster.audit=/tmp", "audit"),
        ("logger.wandb_enabled=true", "trackers"),
    ],
)
def test_a_key_that_asks_for_an_extra_names_it(bare, override, extra, tmp_path):
    run = tmp_path / "run"
    ended = _submit(bare, "tiny_sft", override, f"run_dir={run}")
    assert ended.returncode == 2 and not run.exists()
    line = next(line for line in ended.stderr.splitlines() if f"the extra '{extra}'" in line)
    assert override.partition("=")[0] in line and EXTRAS[extra].paths[0] in line


@pytest.mark.parametrize(
    ("name", "text", "extra"),
    [
        ("theirs.yaml", "grpo: {max_num_steps: 1}\npolicy: {model_name: x}\n", "nemo_rl"),
        ("run.sh", "python3 -m verl.trainer.main_ppo a.b=1\n", "verl"),
    ],
)
def test_a_foreign_recipe_names_the_extra_that_reads_it(bare, name, text, extra, tmp_path):
    (tmp_path / name).write_text(text)
    ended = _submit(bare, str(tmp_path / name))
    assert ended.returncode == 2 and f"the extra '{extra}' (launch/recipes/{extra})" in ended.stderr

"""A run is a folder: what is in it, who may write into it, and what is recorded about each submission.

    recipe.yaml     resolved                        metrics.jsonl   a line per step
    batch.sh        what was submitted              tensorboard/    the same as curves
    manifest.json   who, when, from which versions  rollouts/       what was sampled
    job.json        the job that writes here        checkpoints/
    submitit/       pickles, the batch's own log    done.json       by rank 0 at the end of a complete run: step
    attempts/       a folder per start: logs, failure.json and the other files of pipeline/attempt.py
The right-hand column is written by the pipeline, the left-hand one here and by the executors.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import getpass
import json
import os
import platform
import shlex
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from launch.job import ROOT, RunJob, read_record, write_json
from pipeline import config
from pipeline.config import Recipe, RecipeError

# Keys that may change when a run is continued. They say where it runs, how long, how its work is divided and what is written
# beside it; none of them changes a step that is computed, but for the rounding of sums that are divided otherwise.
# run_dir is here because the same folder has many spellings.
MAY_DIFFER = (
    "run_dir",
    "plan.*",
    "needs",
    "cluster.*",
    "logger.*",
    "checkpointing.*",
    "*.max_num_steps",
    "*.val_*",
    "*.max_val_samples",
    "env.*.served_by",
    "env.*.cpu_offload",
    "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.activation_checkpointing",
    "policy.dtensor_cfg.cpu_offload",
    "policy.megatron_cfg.*_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.num_layers_in_*_pipeline_stage",
    "policy.megatron_cfg.activation_checkpointing",
    "policy.megatron_cfg.recompute_*",
    "policy.megatron_cfg.checkpoint.*",
    "policy.megatron_cfg.force_reconvert_from_hf",
)


def earlier(recipe: Recipe) -> Recipe | None:
    """The recipe that this run was last submitted as. Raises RecipeError if its folder cannot be written or read."""
    run_dir = Path(recipe.run_dir).absolute()
    _check_writable(run_dir)
    if not (path := run_dir / "recipe.yaml").exists():
        return None
    try:
        before = config.read(path)
    except (RecipeError, ValueError) as error:
        raise RecipeError(
            f"run_dir: {run_dir} holds a recipe that this version cannot read ({error}); take another folder"
        ) from None
    backend = config.asked_backend(before.policy)  # older versions wrote one of the two keys only
    return config.decided(before, backend) if backend else before


def check(recipe: Recipe) -> None:
    """Raises RecipeError if this recipe may not write into its run_dir: it is another recipe's, or cannot be written."""
    before = earlier(recipe)
    if before is not None and (difference := first_difference(before, recipe)):
        key, old, new = difference
        raise RecipeError(
            f"run_dir: {Path(recipe.run_dir).absolute()} holds another recipe: {key} is {old} there and {new} here; take"
            f" another folder (run_dir=...), or give {key}={old}"
        )


def _check_writable(run_dir: Path) -> None:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise RecipeError(f"run_dir: {run_dir} cannot be a folder: {existing} is not one; give another run_dir=...")
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        raise RecipeError(
            f"run_dir: {run_dir} cannot be written: {getpass.getuser()} may not write in {existing}; give another run_dir=..."
        )


def first_difference(before: Recipe, now: Recipe) -> tuple[str, Any, Any] | None:
    """(key, value before, value now) of the first key that must not differ, in the order of the schema."""
    old, new = _flat(before), _flat(now)
    for key in [*new, *(key for key in old if key not in new)]:
        if old.get(key) != new.get(key) and not any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_DIFFER):
            return key, old.get(key), new.get(key)
    return None


def _flat(recipe: Recipe) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", OmegaConf.to_container(OmegaConf.structured(recipe)))
    return flat


def live_job(run_dir: Path) -> RunJob | None:
    """The job that still writes into this folder. Raises RecipeError where that cannot be told."""
    record = read_record(run_dir)
    if record is None:
        return None
    job = record.attach(run_dir)
    try:
        status = job.status(now=True)
    except FileNotFoundError:
        raise RecipeError(
            f"run_dir: {run_dir} was last written by {job.name()}, and there is no scontrol here to ask whether it has ended;"
            f" go on from where Slurm is, or, if it has ended, delete {run_dir}/job.json"
        ) from None
    return None if status.ended else job


def refuse_live(run_dir: Path) -> None:
    """Raises RecipeError if a job still writes into this folder."""
    if job := live_job(run_dir):
        raise RecipeError(
            f"run_dir: {job.name()} is still writing into {run_dir}; follow it with `python launch/submit.py"
            f" follow={run_dir}`, cancel it, or take another folder"
        )


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Create the folder if need be and hold it while a job is submitted. Raises RecipeError if a job or a submission has it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / ".lock", "w")  # noqa: SIM115 closed below
    except OSError as error:
        raise RecipeError(f"run_dir: {run_dir} cannot be written: {error.strerror}; give another run_dir=...") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(
                f"run_dir: {run_dir} is just being submitted to by someone else; wait for that, or take another"
            ) from None
        refuse_live(run_dir)
        yield


def done_step(run_dir: Path) -> int | None:
    """The step at which the run was complete, if it is."""
    path = run_dir / "done.json"
    return json.loads(path.read_text())["step"] if path.exists() else None


def prepare(recipe: Recipe, run_dir: Path, script: str) -> None:
    """Before a submission, under `locked`: what will run, and nothing left that says it has ended."""
    config.write(recipe, run_dir / "recipe.yaml")
    (run_dir / "batch.sh").write_text(script)
    (run_dir / "done.json").unlink(missing_ok=True)


def append_manifest(run_dir: Path, executor: str, job_id: str, command: list[str]) -> None:
    """One entry per submission, so that a result can be traced to what made it."""
    path = run_dir / "manifest.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "command": shlex.join(command),
        "cwd": os.getcwd(),
        "executor": executor,
        "job_id": job_id,
        "git": _git(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("hetstep", "torch", "vllm", "transformers", "submitit")},
    }
    write_json(path, [*entries, entry])


def _git() -> dict[str, Any] | None:
    """The commit of the code and whether it was changed since; None outside a git checkout."""

    def git(*args: str) -> str | None:
        try:
            answer = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return None if commit is None else {"commit": commit, "dirty": bool(git("status", "--porcelain"))}


def _version(package: str) -> str | None:
    """As installed where the job is submitted from; None if it is only in the containers. vllm may be its CPU build."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None

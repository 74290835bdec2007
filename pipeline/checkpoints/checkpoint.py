"""Write checkpoints that a kill at any moment cannot corrupt.

    checkpoints/
      .step_000020.<attempt>.partial/   being written; never read
      step_000010/                      complete: renamed only when everything in it is on disk
        lineage.json                    the run and the step (pipeline/lineage/input_records.py); also in hf/
        complete.json                   version, step, the loop's state, and the size of every file
        train-rank00000.safetensors ... the train backend's state
        buffer.msgpack                  rollouts that no step has trained on yet, if any (pipeline/coordination/buffer.py)
        hf/                             a Hugging Face checkpoint, if checkpointing.save_consolidated;
                                        the run folder's own `hf` links to the latest when the run has ended
      .step_000005.<attempt>.removed/   superfluous; its removal failed or goes on, and the next start retries it

With a key (checkpointing.encryption) each file but complete.json, digests.sha256 and lineage.json is encrypted
(pipeline/encryption).

The partial folder has the attempt's name, so an earlier attempt that still writes cannot touch the files of its rerun. Generate
ranks write nothing: a refit restores their weights, each request has its own seed, and rank 0 keeps the rollouts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pipeline.algorithms import build
from pipeline.config import CheckpointingConfig, Problem, Recipe, TimeoutsConfig, uses_megatron
from pipeline.files import digests, small_files, storage, stored_files
from pipeline.files.small_files import Count
from pipeline.files.storage import RetryPolicy, append, retrying, sync, write_durably
from pipeline.files.stored_files import FileKey
from pipeline.recipe.problems import RecipeError
from pipeline.seams import job_events

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"
ROLLOUTS = "buffer.msgpack"
NAME = re.compile(r"step_\d+")  # of a checkpoint's folder
VERSION = 3
"""Version of a checkpoint's contents. In version 1 a schedule counted optimizer updates; since 2 it counts steps of the
algorithm. Since 3 each file has a digest."""
SCHEDULES, DIGESTS = 2, 3
CIPHER = "AES-256-GCM"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int
    metric: float | None  # the value of checkpointing.metric_name when it was saved
    state: dict[str, Any]  # of the training loop
    version: int = VERSION
    record: dict[str, Any] = field(default_factory=dict, repr=False)  # all that complete.json has

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the key with which the checkpoint is encrypted; None if it is not encrypted."""
        return (self.record.get("encryption") or {}).get("key")

    def rollouts(self, key: FileKey | None = None) -> bytes:
        """Return the rollout buffer's state, b"" if there is none. Raises RecipeError if it is encrypted with another key."""
        path = self.folder / ROLLOUTS
        return stored_files.read_bytes(path, key) if path.exists() else b""


class Checkpoints:
    """The checkpoints of a run, as rank 0 manages them."""

    def __init__(
        self,
        run_dir: Path,
        attempt: str,
        config: CheckpointingConfig,
        retry: RetryPolicy = storage.NO_RETRIES,
        key: FileKey | None = None,
    ):
        """Bind to a run. key: decrypts checkpoints and, if checkpointing.encryption.enabled, encrypts new ones."""
        self.key, self.writing_key = key, key if config.encryption.enabled else None
        self._folder = run_dir / "checkpoints"
        self._attempt = attempt
        self._config = config
        self.retry = retry
        self._partial: Path | None = None  # the one being written
        self._seen: dict[Path, Checkpoint] = {}  # known to be complete
        self._skipped: set[Path] = set()  # logged as incomplete

    def all(self) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first."""
        return complete_in(self._folder)

    def _list_complete(self) -> list[Checkpoint]:
        """Return the same as `all`, without another look at the files of checkpoints that are known to be complete."""
        self._seen = {path: checkpoint for path in _folders(self._folder) if (checkpoint := self._seen.get(path) or read(path))}
        return list(self._seen.values())

    def latest(self) -> Checkpoint | None:
        """Return the latest complete checkpoint, or None.

        Waits for the checkpoint that earlier attempts recorded: another node may have written it, and this one may see it late.
        """
        self._wait_for_progress()
        for folder in reversed(_folders(self._folder)):
            try:
                return _complete(folder)
            except IncompleteCheckpoint as why:
                if folder not in self._skipped:
                    logger.warning("%s is skipped, because it is not complete: %s", folder, why)
                self._skipped.add(folder)
        return None

    def _wait_for_progress(self) -> None:
        progress_files = [(path.stat().st_mtime, path) for path in self._folder.parent.glob("attempts/*/progress")]
        if progress_files:
            when, path = max(progress_files)
            try:
                folder = self._folder / _name(small_files.read(path, int) or 0)
            except (RecipeError, OSError) as error:  # a crash has cut it
                logger.warning("%s cannot be read, so a checkpoint that it names may be missed: %s", path, error)
                return
            try:
                storage.wait_for(folder, max(0.0, storage.SEEN_S - (time.time() - when)))
            except storage.StorageError as error:
                logger.warning("continuing without %s, which %s names: %s", folder.name, path, error)

    def clean(self) -> None:
        """Remove partial checkpoints of killed attempts, and checkpoints whose earlier removal failed."""
        for folder in self._folder.glob(".step_*"):
            _remove(folder)

    def begin(self, step: int) -> Path:
        """Return an empty folder to write a checkpoint into."""
        partial = self._folder / f".{_name(step)}.{self._attempt}.partial"

        def make() -> None:
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)

        self._retrying(make, partial)
        self._partial = partial
        return partial

    def keep_rollouts(self, partial: Path, record: bytes) -> None:
        """Add the rollout buffer's state to a checkpoint, unless it is empty."""
        if record:
            content = stored_files.encrypt(record, self.writing_key, ROLLOUTS) if self.writing_key else record
            self._retrying(lambda: append(partial / ROLLOUTS, 0, content), partial)

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Remove the partial checkpoint if the block fails, since it may have filled the disk."""
        try:
            yield
        except Exception:
            if self._partial is not None and self._partial.exists():
                _remove(self._partial)
            raise

    def commit(
        self, partial: Path, step: int, metric: float | None, state: dict[str, Any], known: Mapping[str, str] = {}
    ) -> Checkpoint:
        """Turn a partial folder, whose files are all on disk, into a checkpoint. Then remove superfluous checkpoints.

        known: path within the folder -> SHA-256, computed when the file was written; it is computed here for all other files.
        Waits until this node sees the files in `known`, which other nodes may have written. Raises StorageError.
        """
        folder = self._folder / _name(step)
        written: dict[str, Any] = {}

        def seal() -> None:
            if missing := sorted(known.keys() - _sizes(partial).keys()):
                storage.seen_within(storage.SEEN_S, lambda: known.keys() <= _sizes(partial).keys(), partial / missing[0])
            run_dir = self._folder.parent
            job_events.emit(lambda observer: observer.checkpoint_written(partial, run_dir, step, self._attempt))
            record = {"version": VERSION, "step": step, "metric": metric, "state": state, "files": _sizes(partial)}
            record["digests"] = digests.add_manifest(partial, known, (COMPLETE,))[digests.MANIFEST]
            record["encryption"] = {"cipher": CIPHER, "key": self.writing_key.fingerprint} if self.writing_key else None
            written.update(json.loads(json.dumps(record)))
            written.update(seals(written, self.writing_key))
            write_durably(partial / COMPLETE, json.dumps(written))

        def move() -> None:
            if partial.exists():  # otherwise an earlier try moved it and failed in `sync`
                if folder.exists():  # incomplete: `latest` skipped it
                    shutil.rmtree(folder)
                partial.rename(folder)
            sync(self._folder)

        with self.discarding():
            self._retrying(seal, partial)
            self._retrying(move, folder)
        self._partial = None
        complete = Checkpoint(folder, step, metric, state, VERSION, written)
        self._seen[folder] = complete
        for checkpoint in superfluous(self._list_complete(), self._config):
            gone = self._folder / f".{checkpoint.folder.name}.{self._attempt}.removed"
            _remove(checkpoint.folder, gone)
        return complete

    def _retrying(self, work: Callable[[], object], path: Path) -> None:
        retrying(work, "writing a checkpoint", path, self.retry)

    def link_latest(self, link: Path, part: str) -> None:
        """Point `link` at a part of the latest checkpoint, if it has that part."""
        latest = next(iter(reversed(self.all())), None)
        if latest and (latest.folder / part).exists():
            beside = link.with_name(f".{link.name}.{self._attempt}")

            def make() -> None:
                beside.unlink(missing_ok=True)
                beside.symlink_to(os.path.relpath(latest.folder / part, link.parent))
                beside.replace(link)

            self._retrying(make, link)


def superfluous(checkpoints: list[Checkpoint], config: CheckpointingConfig) -> list[Checkpoint]:
    """Return the checkpoints to delete: all except the latest and the best `keep_top_k` by the metric, then by the step."""
    if config.keep_top_k is None or not checkpoints:
        return []

    def rank(checkpoint: Checkpoint) -> tuple[bool, float, int]:
        value, sign = checkpoint.metric, 1 if config.higher_is_better else -1
        if value is None or math.isnan(value):  # nothing was scored, or the loss diverged
            return False, 0.0, checkpoint.step
        return True, sign * value, checkpoint.step

    best = sorted(checkpoints, key=rank, reverse=True)[: config.keep_top_k]
    return [checkpoint for checkpoint in checkpoints if checkpoint not in best and checkpoint is not checkpoints[-1]]


def version_problem(checkpoint: Checkpoint, recipe: Recipe) -> Problem | None:
    """Return the problem if a run of this recipe cannot resume a checkpoint of an earlier version, else None.

    Version 1 advanced learning-rate schedules with every optimizer update. The count in its checkpoints has the same meaning
    here if there is no schedule, or if a step of this recipe advances its schedules as often as it updates.
    """
    algorithm, policy = build(recipe), recipe.policy
    updates, schedules = algorithm.updates_per_step, [policy.scheduler]
    if uses_megatron(policy):
        schedules.append(policy.megatron_cfg.scheduler)
    if algorithm.needs.critic:
        schedules.append(recipe.value.scheduler)
    if checkpoint.version >= SCHEDULES or schedules.count(None) == len(schedules) or updates == algorithm.advances_per_step:
        return None
    return Problem(
        "run_dir",
        "wrong-version",
        f"{checkpoint.folder} counts its learning-rate schedule in optimizer updates; this version counts steps. A step has"
        f" {updates} updates, so resuming would change the learning rate. Try the version that wrote it (the run's"
        " manifest.json names the commit), or another run from its weights (python launch/export.py)",
    )


def wait_until_seen(folder: Path) -> None:
    """Wait until this node sees all files of a complete checkpoint that another node wrote. Raises StorageError."""
    storage.seen_within(storage.SEEN_S, lambda: read(folder), folder)


def storage_timeout_s(timeouts: TimeoutsConfig) -> float:
    """Return the seconds of `timeouts.storage`; null stands for half of `timeouts.save`, at most 600 s."""
    return min(600.0, timeouts.save / 2) if timeouts.storage is None else timeouts.storage


def kept(run_dir: Path) -> str:
    """Return a sentence about the part of a run that is on disk: the last checkpoint and metrics. Any rank may call this."""
    with contextlib.suppress(OSError, RecipeError):
        complete = complete_in(run_dir / "checkpoints")
        checkpoint = f"the checkpoint of step {complete[-1].step}, the last complete one" if complete else "no checkpoint yet"
        steps = [line["step"] for line in small_files.lines(run_dir / "metrics.jsonl", dict[str, Any])]
        metrics = f"the metrics to step {steps[-1]}" if steps else "no metrics yet"
        return f"Kept: {checkpoint}, and {metrics}"
    return "What is kept is unknown: the run folder cannot be read"


def complete_in(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, oldest first. Other folders, such as `step_000100_keep`, do not count."""
    return [checkpoint for path in _folders(folder) if (checkpoint := read(path))]


def _folders(folder: Path) -> list[Path]:
    folders = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step_")))


def _sizes(folder: Path) -> dict[str, int]:
    """Return path within the folder -> size of the file in bytes, without complete.json and digests.sha256."""
    paths = [folder / name for name in digests.names_in(folder) if name not in (COMPLETE, digests.MANIFEST)]
    statuses = zip(paths, _stats(paths), strict=True)
    return {str(path.relative_to(folder)): status.st_size for path, status in statuses if stat.S_ISREG(status.st_mode)}


def _stats(paths: list[Path]) -> list[os.stat_result]:
    """Return the status of each path, asking for several in parallel as file servers allow. Raises OSError."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(Path.stat, paths))


def _remove(folder: Path, gone: Path | None = None) -> None:
    """Remove a folder. It is first renamed to `gone`, where the next start finds it if this fails. A failure is only logged."""
    try:
        shutil.rmtree(folder.rename(gone) if gone else folder)
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next start tries again", folder, error)


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint, which may not exist."""
    return run_dir / "checkpoints" / _name(step)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def seals(record: Mapping[str, Any], key: FileKey | None) -> dict[str, str]:
    """Return the seals of complete.json, which show whether it was changed: its SHA-256 and, with a key, its HMAC.

    record: the values of complete.json, as JSON reads them.
    """
    text = json.dumps({name: record[name] for name in sorted(record) if name not in ("seal", "mac")}, sort_keys=True).encode()
    return {"seal": hashlib.sha256(text).hexdigest(), **({"mac": key.mac(text)} if key else {})}


class IncompleteCheckpoint(Exception):
    """Raised for a checkpoint that was not written to its end, or has lost files since."""


def read(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or None if it is not complete."""
    try:
        return _complete(folder)
    except IncompleteCheckpoint:
        return None


def incomplete(folder: Path) -> str | None:
    """Return why the checkpoint in a folder is not complete, naming a missing or wrong file; None if it is complete."""
    try:
        _complete(folder)
    except IncompleteCheckpoint as why:
        return str(why)
    return None


def read_record(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder without a look at its files. Raises OSError, ValueError."""
    record = small_files.read(folder / COMPLETE, _Record)
    if record is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / COMPLETE))
    return Checkpoint(folder, record["step"], record["metric"], record["state"], record.get("version", 1), dict(record))


class _Record(TypedDict):
    """The contents of complete.json."""

    step: Count
    metric: float | None
    state: dict[str, Any]
    files: dict[str, int]  # sizes, by path within the folder
    version: NotRequired[int]


def _complete(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises IncompleteCheckpoint if a file is missing or has another size."""
    try:
        complete = read_record(folder)
        files = dict(complete.record["files"])
        statuses = _stats([folder / name for name in files])
        sizes = {name: status.st_size for name, status in zip(files, statuses, strict=True)}
    except FileNotFoundError as error:
        raise IncompleteCheckpoint(
            f"{Path(error.filename).name}: got no such file; expected the file that the run wrote"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENOTDIR):
            raise
        raise IncompleteCheckpoint(f"{Path(error.filename).name}: got no regular file; expected one") from None
    except (ValueError, KeyError, TypeError):  # zeros or a part of it, after a power cut
        raise IncompleteCheckpoint(f"{COMPLETE}: got an unusable record; expected the record that the run wrote") from None
    if wrong := next((name for name, size in files.items() if sizes[name] != size), None):
        raise IncompleteCheckpoint(f"{wrong}: got {sizes[wrong]:,} bytes; expected {files[wrong]}")
    return complete

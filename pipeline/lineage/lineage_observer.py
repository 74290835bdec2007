"""In the job: mark checkpoints with their run, and hash the run's inputs in a thread.

Files of 100 GB take minutes to read, so a submission only lists them, and rank 0's process hashes them beside its work, at the
lowest priority. A file has no hash until the thread has read it. If a run ends earlier, the hashes so far stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.files import small_files
from pipeline.files.digests import Stopped
from pipeline.lineage import input_records
from pipeline.lineage.file_hashes import HashCache, append_hash, read_hashes, rewritten
from pipeline.lineage.input_records import FOLDER, HASHES, INPUTS, MARK
from pipeline.seams.job_events import JobObserver

logger = logging.getLogger(__name__)

END_S = 60.0
"""How long a complete run waits at its end for hashes that are still computed."""


def mark_checkpoint(partial: Path, run_dir: Path, step: int, attempt: str) -> None:
    """Write lineage.json, with the run and the step, into a checkpoint and into the model in it.

    Does nothing for a run without an id.
    """
    run = input_records.run_id(run_dir)
    if run is None:
        return
    mark = hashlib.sha256(f"{run} {step} {attempt}".encode()).hexdigest()[:32]
    record = {"kind": "checkpoint", "id": mark, "run": {"id": run, "name": run_dir.name}, "step": step, "attempt": attempt}
    for folder in (partial, partial / "hf"):
        if folder.is_dir():
            small_files.write(folder / MARK, record)


class LineageObserver(JobObserver):
    """Marks checkpoints, and hashes the inputs of the run that rank 0's process coordinates."""

    def __init__(self) -> None:
        """Build the observer, which has not hashed anything yet."""
        self._hashing: Hashing | None = None

    def started(self, run_dir: Path) -> None:
        """Begin to hash the run's inputs in a thread."""
        self._hashing = Hashing(run_dir)
        self._hashing.start()

    def ended(self, run_dir: Path) -> None:
        """Stop hashing. If the run is complete, first wait until everything is hashed, END_S seconds at most."""
        if self._hashing:
            self._hashing.finish(END_S if (run_dir / "done.json").exists() else 0.0)

    def checkpoint_written(self, partial: Path, run_dir: Path, step: int, attempt: str) -> None:
        """Mark the checkpoint. Raises OSError."""
        mark_checkpoint(partial, run_dir, step, attempt)


class Hashing:
    """A thread that hashes each input of a run once."""

    def __init__(self, run_dir: Path):
        """Bind to the run's folder."""
        self._run_dir = run_dir
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lineage", daemon=True)

    def start(self) -> None:
        """Begin to hash the inputs; a run of an earlier version has none."""
        self._thread.start()

    def finish(self, wait_s: float) -> None:
        """Wait until everything is hashed, `wait_s` seconds at most, and stop."""
        self._thread.join(wait_s)
        self._stopping.set()
        if self._thread.is_alive():
            logger.warning("lineage: not all inputs are hashed after %g s; the next start of the run hashes the others", wait_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for message in hash_inputs(self._run_dir, self._stopping.is_set):
                logger.warning("lineage: %s", message)
        except (Stopped, OSError, ValueError) as error:
            logger.warning("lineage: the inputs of this run are not all hashed: %s", error)


def hash_inputs(run_dir: Path, stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
    """Hash the inputs that have no hash yet into hashes.jsonl. Yield a message for each unreadable or changed input.

    stop: a function called between blocks; Stopped is raised if it returns True.
    """
    records = input_records.read_inputs(run_dir)
    complete = [input_records.complete_entry(entry) for entry in records.get("inputs", ())]
    if complete != records.get("inputs", []):
        records["inputs"] = complete
        small_files.write(run_dir / FOLDER / INPUTS, records)
    cache = HashCache(Path(records["cache"]) if records.get("cache") else None)
    path = run_dir / FOLDER / HASHES
    done = dict(read_hashes(path))
    for submitted in dict.fromkeys(state for entry in records.get("inputs", ()) for state in input_records.files_of(entry)):
        if submitted in done:
            continue
        try:
            state, digest = cache.sha256(Path(submitted.path), stop)
        except FileNotFoundError:
            # such as the image of a container
            logger.info("lineage: %s does not exist on this node, and is not hashed", submitted.path)
            continue
        except OSError as error:
            yield f"{submitted.path} cannot be read here: {error.strerror}"
            continue
        if state != submitted:
            yield f"{submitted.path} has changed since the submission, so its content at the submission is unknown"
        before = [(old, content) for old, content in done.items() if old.path == state.path]
        if before and before[-1][1] != digest:
            yield rewritten(before[-1][0], state, before[-1][1], digest)
        append_hash(path, state, digest)
        done[state] = digest


OBSERVER = LineageObserver()

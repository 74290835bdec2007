"""An attempt is one start of all ranks. From its folder, attempts/NAME in the run folder, the launcher reads how it ended.

    started         unix seconds; the launcher writes it before there are ranks
signals         a line for each signal that the launcher received for the ranks, see pipeline/job/signals.py
    stop            exists if a user asked the ranks to save and stop (run_control.py); they are then not started again
    rank00000.log   the log of a rank
    srun-train.out  srun's output for each component's step; Slurm only
    failed_step     `COMPONENT FIRST_RANK` of the first step that failed; Slurm only, from the batch script
    killed          the first rank that a signal ended, and the kernel's record if it was for memory; local runs only
    failure.json    where and why the first rank failed; that rank, or the rank that noticed it, writes the file
    progress        the step of the latest checkpoint that this attempt completed; absent until it completes a checkpoint
    requeue         why the ranks left on purpose after saving everything; absent if they did not leave
    bad_nodes       a line `NODE: why` for each node that failed the checks
    verdict         `done`, `requeue: why` or `stop: why`, by launch/executors/verdict.sh when all ranks have ended

`attempts/current` names the attempt that may write into the run folder. After Slurm has given up a node, its ranks may live
on beside the rerun. Rank 0 therefore reads `current` before it writes, and ends if a later attempt has claimed the run.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.files.storage import RetryPolicy, retrying, write_durably


class Superseded(RuntimeError):
    """A later attempt has claimed the run folder."""


class Attempt:
    """Writes an attempt's folder on rank 0. Methods raise StorageError if the disk stays full or the file system is away."""

    def __init__(self, folder: Path, patience_s: float = 0.0):
        """Open the folder. patience_s: seconds to retry while the disk is full or the file system is unavailable."""
        self.folder = folder
        self._retry = RetryPolicy(patience_s)
        self._current = folder.parent / "current"

    @property
    def name(self) -> str:
        """The folder's name, such as `17-0`: job and restart."""
        return self.folder.name

    def claim(self) -> None:
        """Make this attempt the only one that may write. Rank 0 calls it before it writes anything else into the run folder."""
        self._write(self._current, self.name)

    def check(self) -> None:
        """Raise Superseded if a later attempt has claimed the run. Rank 0 calls it before it writes into the run folder."""
        current = retrying(
            self._current.read_text, "reading the name of the current attempt", self._current, self._retry
        ).strip()
        if current != self.name:
            raise Superseded(f"attempt {self.name} has been superseded by {current}, so it writes no more")

    def record_progress(self, step: int) -> None:
        """Record the step of a complete checkpoint."""
        self._write(self.folder / "progress", str(step))

    def ask_requeue(self, reason: str) -> None:
        """Record why the ranks leave, so that the launcher requeues the job."""
        self._write(self.folder / "requeue", reason)

    def record_bad_nodes(self, nodes: dict[str, str]) -> None:
        """Record nodes that failed the checks, so that a requeue excludes them. nodes: name -> problem."""
        self._write(self.folder / "bad_nodes", "\n".join(f"{node}: {problem}" for node, problem in nodes.items()))

    def _write(self, path: Path, text: str) -> None:
        retrying(lambda: write_durably(path, text + "\n"), f"writing the attempt's {path.name}", path, self._retry)

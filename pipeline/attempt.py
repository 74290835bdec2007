"""One start of all ranks: attempts/<name>/ in the run folder, and what rank 0 leaves there for whoever decides what comes next.

    started         unix seconds; by the launcher, before there are ranks
    signals         a line for each signal that the launcher took for the ranks; under Slurm alone, see pipeline/signals.py
    rank00000.log   what each rank printed
    srun-train.out  what srun said of each component's step; under Slurm alone
    failed_step     `COMPONENT FIRST_RANK` of the first step that failed; under Slurm alone, by the batch script
    failure.json    by the first rank that failed: where and why
    progress        the step of the latest checkpoint that this attempt completed; absent: none yet
    requeue         why the ranks left on purpose, with everything saved; absent: they did not
    bad_nodes       a line `NODE: why` for each node that failed the checks
    verdict         by launch/executors/verdict.sh, when all ranks have ended: `done`, `requeue: why` or `stop: why`

`attempts/current` names the attempt that may write into the run folder. A node that Slurm has given up may keep its ranks alive
beside the rerun: before rank 0 writes it looks there, and ends itself if a later attempt has taken the run over.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.storage import RetryPolicy, retrying, write_durably


class Superseded(RuntimeError):
    """A later attempt writes into the run folder now."""


class Attempt:
    def __init__(self, folder: Path, patience_s: float = 0.0):
        """patience_s: how long to wait for a disk that is full, or a file system that is away."""
        self.folder = folder
        self._retry = RetryPolicy(patience_s)
        self._current = folder.parent / "current"

    @property
    def name(self) -> str:
        return self.folder.name

    def claim(self) -> None:
        """Rank 0, before it writes anything else into the run folder."""
        self._leave(self._current, self.name)

    def check(self) -> None:
        """Rank 0, before it writes into the run folder. Raises Superseded."""
        current = retrying(self._current.read_text, "reading who may write", self._current, self._retry).strip()
        if current != self.name:
            raise Superseded(f"attempt {self.name} has been superseded by {current}: it writes no more")

    def progressed(self, step: int) -> None:
        self._leave(self.folder / "progress", str(step))

    def ask_requeue(self, why: str) -> None:
        self._leave(self.folder / "requeue", why)

    def tell_bad_nodes(self, nodes: dict[str, str]) -> None:
        """nodes: name -> why."""
        self._leave(self.folder / "bad_nodes", "\n".join(f"{node}: {why}" for node, why in nodes.items()))

    def _leave(self, path: Path, text: str) -> None:
        retrying(lambda: write_durably(path, text + "\n"), f"writing the attempt's {path.name}", path, self._retry)

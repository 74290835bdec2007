"""What a run tells: metrics.jsonl, TensorBoard and rollouts, all written by rank 0 inside the run folder.

metrics.jsonl has one object per step. A rerun cuts it, TensorBoard's events and the rollouts back to the step that was
restored, so that no step appears twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint import write_durably
from pipeline.config import LoggerConfig
from pipeline.types import RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_REPRODUCIBLE = ("time", "throughput/")  # keys that begin so differ from run to run; all others must not


class Metrics:
    def __init__(self, run_dir: Path, config: LoggerConfig, after_step: int | None):
        """Go on after a step that was restored, dropping what was written beyond it; None: begin, dropping everything."""
        last = -1 if after_step is None else after_step  # step 0 has a line too: the validation before the first step
        self._path = run_dir / "metrics.jsonl"
        self._rollouts = run_dir / "rollouts"
        self._config = config
        self._clocks: dict[str, float] = {}
        self._rollouts.mkdir(exist_ok=True)
        self._cut(last)
        self._file = open(self._path, "a")  # noqa: SIM115 it lives as long as the run
        self._board = _board(run_dir / "tensorboard", last) if config.tensorboard_enabled else None

    def _cut(self, last: int) -> None:
        kept = [line for line in read(self._path) if line["step"] <= last]
        beside = self._path.with_suffix(".tmp")
        write_durably(beside, "".join(json.dumps(line) + "\n" for line in kept))
        beside.replace(self._path)
        for path in self._rollouts.glob("*_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > last:
                path.unlink()

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time of a block to this step's `time/<name>`, in seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._clocks[name] = self._clocks.get(name, 0.0) + time.perf_counter() - start

    def take_clocks(self) -> dict[str, float]:
        clocks = {f"time/{name}": seconds for name, seconds in self._clocks.items()}
        self._clocks = {}
        return clocks

    def log(self, step: int, values: dict[str, float]) -> None:
        """One step's line. NaN and infinity are written as JSON's null."""
        clean = {key: value if value == value and abs(value) != float("inf") else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **clean}) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in values.items():
                self._board.add_scalar(key, value, step)
            self._board.flush()
        print(f"step {step}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()), flush=True)

    def log_rollouts(
        self, step: int, groups: list[RolloutGroup], tokenizer: PreTrainedTokenizerBase, kind: str = "step"
    ) -> None:
        """A step's rollouts, one object per line, in rollouts/<kind>_<step>.jsonl; `kind` is "step" or "val"."""
        records = [_record(group, sample, tokenizer) for group in groups for sample in range(len(group.rollouts))]
        with open(self._rollouts / f"{kind}_{step:06d}.jsonl", "w") as file:
            for record in records[: self._config.num_rollouts_to_log]:
                file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def mean_metrics(prefix: str, results: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step's updates as one: means, but `_max` and `_min` by that."""

    def combine(name: str) -> float:
        values = [result[name] for result in results]
        if name.endswith("_max"):
            return max(values)
        return min(values) if name.endswith("_min") else sum(values) / len(values)

    return {f"{prefix}/{name}": combine(name) for name in results[0]}


def rollout_metrics(prefix: str, groups: list[RolloutGroup]) -> dict[str, float]:
    """Means over rollouts: reward, length in tokens, the share cut for length, and each of the environment's metrics."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.completion.tokens) for rollout in rollouts]
    values = {
        "reward": _mean([rollout.reward for rollout in rollouts]),
        "completion_tokens": _mean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated": _mean([float(rollout.completion.finish == "length") for rollout in rollouts]),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        values[name] = _mean([rollout.metrics[name] for rollout in rollouts if name in rollout.metrics])
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # what follows the last newline is empty or cut short


def _record(group: RolloutGroup, sample: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    rollout = group.rollouts[sample]
    return {
        "prompt_index": group.prompt.index,
        "sample": sample,
        "prompt": tokenizer.decode(group.prompt.tokens),
        "prompt_tokens": group.prompt.tokens.tolist(),
        "completion": tokenizer.decode(rollout.completion.tokens),
        "completion_tokens": rollout.completion.tokens.tolist(),
        "task": group.prompt.task,
        "reward": rollout.reward,
        **rollout.metrics,
        "finish": rollout.completion.finish,
        "spans": [[span.version, span.tokens] for span in rollout.completion.spans],
    }


def _board(folder: Path, last: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=last + 1)

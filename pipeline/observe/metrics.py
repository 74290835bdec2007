"""Write and read the metrics of a run: metrics.jsonl, TensorBoard events and rollouts. Rank 0 writes them.

metrics.jsonl has one object per step. A rerun cuts metrics.jsonl, the TensorBoard events and the rollouts back to the restored
step, so no step appears twice. Writing a line is retried if it fails, because the metrics are the result of the run. Failures
to write rollouts or TensorBoard events never stop the run. Missing TensorBoard events are written as soon as possible, at the
latest at the next start.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NotRequired, TypedDict, TypeVar

from pipeline.config import LoggerConfig
from pipeline.files import small_files
from pipeline.files.small_files import Count, Moment
from pipeline.files.storage import NO_RETRIES, SLOW_S, RetryPolicy, append, retrying, tell_slow, write_durably
from pipeline.files.stored_files import FileKey, encrypt, is_encrypted, read_bytes
from pipeline.recipe import user_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.observe.tensorboard_writer import TensorBoardWriter
    from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Turn

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RESOURCES = "resources/"
"""Prefix of the resource monitor's keys. They are too many to be shown in the log."""
NOT_REPRODUCIBLE = ("time", "throughput/", "idle/", RESOURCES)
"""Prefixes of the keys whose values differ between equal runs. All other values must be equal."""


MEND = "Try to remove its line, or to restore the file from a copy"


class StepLine(TypedDict):
    """A line of metrics.jsonl. Its other keys are metrics, whose values are numbers or null."""

    step: Count
    time: Moment


class SaidTurn(TypedDict):
    """A turn of an episode: what the policy said and what it was told, with the numbers of tokens."""

    said: str
    told: str
    said_tokens: NotRequired[Count]
    told_tokens: NotRequired[Count]
    reward: NotRequired[float]
    malformed: NotRequired[bool]


class OtherConversation(TypedDict):
    """A conversation of an episode besides that of `turns`: the text before its first turn, and its turns."""

    context: str
    turns: list[SaidTurn]


class RolloutLine(TypedDict):
    """A line of a rollouts file. Its other keys are metrics of the rollout."""

    prompt: str
    completion: str
    reward: float
    completion_tokens: list[int]
    finish: str
    prompt_tokens: NotRequired[list[int]]
    turns: NotRequired[list[SaidTurn]]
    context: NotRequired[str]
    branches: NotRequired[list[OtherConversation]]
    task: NotRequired[dict[str, Any] | None]
    spans: NotRequired[list[tuple[int, int]]]  # version of the weights, tokens
    notes: NotRequired[dict[str, str]]


class Metrics:
    """Writes a run's metrics, rollouts and TensorBoard events."""

    def __init__(
        self,
        run_dir: Path,
        config: LoggerConfig,
        after_step: int | None,
        retry: RetryPolicy = NO_RETRIES,
        key: FileKey | None = None,
    ):
        """Drop everything after the restored step `after_step`, or everything if it is None. key: encrypts rollouts."""
        self._key = key
        last = -1 if after_step is None else after_step  # step 0 is the validation before the first step
        self._path = run_dir / "metrics.jsonl"
        self._rollouts = run_dir / "rollouts"
        self._config = config
        self._retry = retry
        self._clocks: dict[str, float] = {}
        self._missing: dict[str, list[int]] = {}  # unwritten steps, by what was to be written
        text = self._retrying(lambda: self._cut(last))
        self._size = len(text.encode())
        self._unshown = [json.loads(line) for line in text.splitlines()] if config.tensorboard_enabled else []
        self._tensorboard = _tensorboard_writer(run_dir / "tensorboard", last) if config.tensorboard_enabled else None
        self._show(last)

    def _cut(self, last: int) -> str:
        """Drop the metrics and rollouts of steps after `last`, and return the remaining text of metrics.jsonl."""
        text = "".join(json.dumps(line) + "\n" for line in read(self._path) if line["step"] <= last)
        write_durably(self._path, text)
        for path in self._rollouts.glob("*_*.jsonl"):
            if int(path.stem.rpartition("_")[2]) > last:
                path.unlink()
        return text

    def _retrying(self, work: Callable[[], Result]) -> Result:
        return retrying(work, "writing the metrics", self._path, self._retry)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time of a block to this step's `time/<name>`, in seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._clocks[name] = self._clocks.get(name, 0.0) + time.perf_counter() - start

    def take_clocks(self) -> dict[str, float]:
        """Return `time/NAME` -> seconds that `clock` has added, and reset them."""
        clocks = {f"time/{name}": seconds for name, seconds in self._clocks.items()}
        self._clocks = {}
        return clocks

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append a step's line, which is on disk when this returns. NaN and infinity become JSON's null.

        Raises StorageError if it cannot be written. A write with fsync takes about 4 ms, one without takes 0.02 ms.
        """
        line = {"step": step, "time": time.time(), **_finite(values)}
        text = (json.dumps(line) + "\n").encode()
        self._size = self._retrying(lambda: append(self._path, self._size, text))
        if self._tensorboard is not None:
            self._unshown.append(line)
            self._show(step)
        _log(step, values)

    def log_again(self, step: int, values: dict[str, float]) -> None:
        """Merge values into the line of a step, replacing those under the same keys."""
        new = {"step": step, "time": time.time(), **_finite(values)}
        lines = {line["step"]: line for line in read(self._path)}
        lines[step] = lines.get(step, {}) | new
        text = "".join(json.dumps(line) + "\n" for line in lines.values())
        self._retrying(lambda: write_durably(self._path, text))
        self._size = len(text.encode())
        if self._tensorboard is not None:
            self._tensorboard.show_from(step)
            self._unshown.append(new)
            self._show(step)
        _log(step, values)

    def _show(self, step: int) -> None:
        """Write missing TensorBoard events. If that fails, the next step retries."""
        if self._unshown and self._tensorboard:
            with self._going_on("TensorBoard", step):
                self._tensorboard.show(self._unshown)
                self._unshown = []

    @property
    def logs_rollouts(self) -> bool:
        """Return whether the recipe asks for rollouts, so that `log_rollouts` writes some."""
        return self._config.num_rollouts_to_log != 0

    def log_rollouts(
        self, step: int, groups: list[RolloutGroup], tokenizer: PreTrainedTokenizerBase, kind: str = "step"
    ) -> None:
        """Write the rollouts of a step, one object per line, to rollouts/KIND_STEP.jsonl; `kind` is "step" or "val"."""
        path = self._rollouts / f"{kind}_{step:06d}.jsonl"
        records = itertools.islice(_records(groups, tokenizer), self._config.num_rollouts_to_log)
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        if self._key:
            content = encrypt(content, self._key, path.name)
        with self._going_on("rollouts", step):
            self._retry.check()  # a later attempt may write there
            self._rollouts.mkdir(exist_ok=True)
            try:
                append(path, 0, content, durable=False)
            except OSError:
                path.unlink(missing_ok=True)
                raise

    @contextmanager
    def _going_on(self, output: str, step: int) -> Iterator[None]:
        """Log an OSError of the block, which writes `output`, in place of raising it; later, log the steps that were lost."""
        missing, begun = self._missing.setdefault(output, []), time.monotonic()
        try:
            yield
            if (took := time.monotonic() - begun) > SLOW_S:
                tell_slow(f"writing {output} of step {step}", took)
        except OSError as error:
            if not missing:
                logger.warning("%s of step %d cannot be written (%s); the run goes on without them", output, step, error)
            missing.append(step)
            return
        if missing:
            lost = "nothing is missing" if output == "TensorBoard" else f"the data of steps {_spans(missing)} are lost"
            logger.info("%s can be written again, from step %d on; %s", output, step, lost)
            missing.clear()

    def close(self) -> None:
        """Log the steps whose rollouts or TensorBoard events were never written."""
        for output, steps in self._missing.items():
            if steps:
                logger.warning("%s of steps %s were never written", output, _spans(steps))


class Reader:
    """Reads a metrics.jsonl while a run writes it."""

    def __init__(self, path: Path, steps: int | None = None, replays: bool = False):
        """Bind to a file.

        steps: number of lines before the file's end at which to begin; None: begin at the first line. replays: begin again when
        a restarted run has replaced the file; False: yield no step twice.
        """
        self._path = path
        self._steps = steps
        self._replays = replays
        self._inode = self._offset = 0
        self._latest = self._given = -math.inf  # time of the latest line; likewise when the file was last replaced

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines since the last call. Raises RecipeError for a line that is not a step."""
        try:
            opened = user_files.open_file(self._path)
        except FileNotFoundError:
            return
        with opened as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:  # a restarted run replaces the file
                self._inode, self._given = status.st_ino, self._latest
                self._offset = _last(file, self._steps) if self._steps else 0
            file.seek(self._offset)
            for text in small_files.whole_lines(file, self._path):
                self._offset += len(text)
                step = small_files.parsed(text, StepLine, self._path, remedy=MEND)
                line: dict[str, Any] = {**small_files.checked(step, dict[str, float | None], self._path, remedy=MEND)}
                if self._replays:
                    yield dict(step)  # as it is written, since its digest is compared
                elif line["time"] > self._given:
                    self._latest = line["time"]
                    yield line

    def rewind(self) -> None:
        """Begin again at the first line."""
        self._offset = 0


def read_rollouts(path: Path, key: Callable[[], FileKey | None] = lambda: None) -> list[dict[str, Any]]:
    """Return the complete lines of a rollouts file.

    key: a function that returns the key, called if the file is encrypted. Raises RecipeError for a line that is not JSON, for
    another key, and for a damaged file.
    """
    with user_files.open_file(path) as file:
        encrypted = is_encrypted(file.read(8))
    content = read_bytes(path, key() if encrypted else None)
    complete_lines = (text for text in content.splitlines(keepends=True) if text.endswith(b"\n"))
    return [dict(small_files.parsed(text, RolloutLine, path, remedy=MEND)) for text in complete_lines]


def _last(file: BinaryIO, lines: int) -> int:
    """Return the offset at which the last `lines` lines begin, or fewer lines if they are long."""
    size, looked = file.seek(0, os.SEEK_END), 65536
    while looked < 2 * small_files.LONGEST:
        start = file.seek(max(0, size - looked))
        parts = file.read(size - start).split(b"\n")  # the last one is empty or incomplete
        if start == 0 or len(parts) > lines + 1:
            return size - len(b"\n".join(parts[-lines - 1 :]))
        looked *= 2
    return start + len(parts[0]) + 1


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics.jsonl. Raises RecipeError for a line that is not a step."""
    return list(Reader(path).lines())


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """Return the values with None in place of NaN and infinity, so that JSON has null for them."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _log(step: int, values: dict[str, float]) -> None:
    texts = (f"{key} {value:.4g}" for key, value in values.items() if not key.startswith(RESOURCES))
    logger.info("step %d: %s", step, ", ".join(texts))


def _spans(steps: list[int]) -> str:
    """Return steps as a text of ranges: [1, 2, 3, 7] -> `1-3, 7`."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _tensorboard_writer(folder: Path, last: int) -> TensorBoardWriter:
    from pipeline.observe.tensorboard_writer import TensorBoardWriter  # only rank 0 needs the package

    return TensorBoardWriter(folder, last)


def _records(groups: list[RolloutGroup], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    for group in groups:
        text, tokens = str(tokenizer.decode(group.prompt.tokens)), group.prompt.tokens.tolist()
        for sample, rollout in enumerate(group.rollouts):
            yield _record(group.prompt, text, tokens, sample, rollout, tokenizer)


def _record(
    prompt: Prompt, text: str, tokens: list[int], sample: int, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return a line of a rollouts file.

    `completion` has the whole conversation; `turns` separates completions and observations. `context` is the text before the
    first turn if it is not the prompt, and `branches` has the episode's other conversations.
    """
    turns = []
    if len(rollout.turns) > 1 or any(len(turn.observation) for turn in rollout.turns):
        turns = _turns(rollout.turns, tokenizer)
    branches = [
        {"context": tokenizer.decode(branch.context), "turns": _turns(branch.turns, tokenizer)} for branch in rollout.branches
    ]
    completion = rollout.tokens
    return {
        "prompt_index": prompt.index,
        **({"dataset": prompt.dataset} if prompt.dataset else {}),
        "sample": sample,
        "prompt": text,
        "prompt_tokens": tokens,
        **({} if rollout.context is None else {"context": tokenizer.decode(rollout.context)}),
        "completion": tokenizer.decode(completion)
        if turns
        else "".join(_completion_text(t.completion, tokenizer) for t in rollout.turns),
        "completion_tokens": completion.tolist(),
        **({"turns": turns} if turns else {}),
        **({"branches": branches} if branches else {}),
        "task": prompt.task,
        "reward": rollout.reward,
        **rollout.metrics,
        **({"failure": rollout.failure} if rollout.failure else {}),
        **({"broke": rollout.broke} if rollout.broke else {}),
        **({"extracted": rollout.extracted} if rollout.extracted else {}),
        **({"notes": rollout.notes} if rollout.notes else {}),
        "finish": rollout.finish,
        "spans": [[span.version, span.tokens] for span in rollout.spans],
    }


def _turns(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return [
        {
            "said": _completion_text(turn.completion, tokenizer),
            "told": tokenizer.decode(turn.observation),
            "said_tokens": len(turn.completion.tokens),
            "told_tokens": len(turn.observation),
            **({} if turn.thinking else {"reward": turn.reward}),
            **({"malformed": True} if turn.malformed else {}),
        }
        for turn in turns
    ]


def _completion_text(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a completion, with its special tokens, up to its stop string."""
    text = str(tokenizer.decode(completion.tokens))
    return text.partition(completion.stop)[0] if completion.stop else text

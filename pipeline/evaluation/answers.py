"""The answers of an evaluation, in `answers/TASK.jsonl`, from which a killed evaluation continues.

A line is written as soon as an answer arrives, and forced to disk with the first one that arrives `SYNC_S` after the last time.
A line that a kill left incomplete is dropped at the next start, and its answer is asked again. Of several lines for one sample
the last one counts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.evaluation.base import Answer
from pipeline.storage import NO_RETRIES, RetryPolicy, append, retrying

SYNC_S = 1.0
FOLDER = "answers"


class AnswerLog:
    """The answers of one task."""

    def __init__(
        self,
        run_dir: Path,
        task: str,
        retry: RetryPolicy = NO_RETRIES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the kept answers. check: raises if another attempt has taken over the run folder."""
        self.path = run_dir / FOLDER / f"{task}.jsonl"
        self._retry, self._check = retry, check
        self._answers: dict[tuple[str, int], Answer] = {}
        self._size = 0  # bytes of complete lines
        self._synced_at = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for answer, end in _read(self.path):
            self._answers[answer.question, answer.sample] = answer
            self._size = end

    def has(self, question: str, sample: int = 0) -> bool:
        """Return whether a sample of a question has a score."""
        answer = self._answers.get((question, sample))
        return answer is not None and answer.score is not None

    def __len__(self) -> int:
        return len(self._answers)

    def all(self) -> list[Answer]:
        """Return the answers, ordered by question and sample, whatever the order of their arrival."""
        return [answer for _, answer in sorted(self._answers.items())]

    def add(self, answer: Answer) -> None:
        """Keep an answer. Raises StorageError if it cannot be written until the retries end."""
        self._answers[answer.question, answer.sample] = answer
        line = (json.dumps(dataclasses.asdict(answer), ensure_ascii=False) + "\n").encode(errors="surrogatepass")
        durable = time.monotonic() - self._synced_at > SYNC_S
        if durable:
            self._check()
        at = self._size
        self._size = retrying(lambda: append(self.path, at, line, durable), "writing answers", self.path, self._retry)
        if durable:
            self._synced_at = time.monotonic()


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in a file, ordered by question and sample; of several for one sample the last one."""
    found = {(answer.question, answer.sample): answer for answer, _ in _read(path)}
    return [answer for _, answer in sorted(found.items())]


def _read(path: Path) -> Iterator[tuple[Answer, int]]:
    """Yield the answers of complete lines, each with the position of its line's end."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield Answer(**json.loads(line.decode(errors="surrogatepass"))), end

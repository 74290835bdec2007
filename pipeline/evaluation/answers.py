"""The answers of an evaluation, in `answers/TASK.jsonl`, from which a killed evaluation continues.

A line is written as soon as an answer arrives. If the file was last forced to disk more than `SYNC_S` ago, writing the line
forces it to disk again. A line that a kill or a power cut left incomplete is dropped at the next start, and its question is
asked again. Of several lines for one sample the last one counts. With a key (checkpointing.encryption) each line is encrypted.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.evaluation.questions import Answer
from pipeline.files.storage import NO_RETRIES, RetryPolicy, append, retrying, sync
from pipeline.files.stored_files import FileKey, decrypt_line, encrypt_line
from pipeline.recipe import user_files

logger = logging.getLogger(__name__)

SYNC_S = 1.0
FOLDER = "answers"


class AnswerLog:
    """Holds the answers of one task and appends new ones to their file."""

    def __init__(
        self, run_dir: Path, task: str, retry: RetryPolicy = NO_RETRIES, key: FileKey | None = None, encrypts: bool = True
    ) -> None:
        """Read the answers in the file. retry.check: a function that raises if another attempt has taken over the run folder.

        key: decrypts the answers in the file and, if `encrypts`, encrypts new ones. Raises RecipeError if the file has another
        key.
        """
        self._key = key if encrypts else None
        self.path = run_dir / FOLDER / f"{task}.jsonl"
        self._retry = retry
        self._answers: dict[tuple[str, int], Answer] = {}
        self.added = self.scored = 0  # answers since the start, and those among them that have a score
        self._size = 0  # bytes of complete lines
        self._synced_at = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for answer, end in _read(self.path, lambda: key):
            self._size = end
            if answer:
                self._answers[answer.question, answer.sample] = answer

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
        """Write an answer and hold it as a restart will read it. Raises StorageError if writing fails until the retries end."""
        line = _encode(answer)
        durable = time.monotonic() - self._synced_at > SYNC_S
        at = self._size
        data = encrypt_line(line, self._key, self.path.name, at) if self._key else line
        self._size = retrying(lambda: append(self.path, at, data, durable), "writing answers", self.path, self._retry)
        if durable:
            self._synced_at = time.monotonic()
        self._answers[answer.question, answer.sample] = _decode(line)
        self.added += 1
        self.scored += answer.score is not None

    def sync(self) -> None:
        """Force all answers to disk. Raises StorageError if that fails until the retries end."""
        if self._size:
            retrying(lambda: sync(self.path), "writing answers", self.path, self._retry)


def read_answers(path: Path, key: Callable[[], FileKey | None] = lambda: None) -> list[Answer]:
    """Return the answers in a file, ordered by question and sample. If a sample has several answers, only the last is returned.

    key: a function that returns the key of encrypted lines. Raises RecipeError if the lines have another key.
    """
    answers = {(answer.question, answer.sample): answer for answer, _ in _read(path, key) if answer}
    return [answer for _, answer in sorted(answers.items())]


def encode_answers(answers: Sequence[Answer], name: str, key: FileKey | None) -> bytes:
    """Return the bytes of the answer file `name`. key: encrypts each line; None: the lines are plain."""
    content = b""
    for answer in answers:
        line = (json.dumps(dataclasses.asdict(answer)) + "\n").encode()
        content += encrypt_line(line, key, name, len(content)) if key else line
    return content


def _encode(answer: Answer) -> bytes:
    """Return the answer's line in UTF-8. A text with half a surrogate pair, which UTF-8 cannot encode, is escaped to ASCII."""
    record = dataclasses.asdict(answer)
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def _decode(line: bytes) -> Answer:
    return Answer(**json.loads(line))


def _read(path: Path, key: Callable[[], FileKey | None]) -> Iterator[tuple[Answer | None, int]]:
    """Yield (answer, position of the line's end) for each complete line. The answer is None for a line that is not JSON."""
    try:
        stream = user_files.open_file(path)
    except FileNotFoundError:
        return
    end = 0
    with stream as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            plain = decrypt_line(line, key, path, end)
            end += len(line)
            try:
                answer = _decode(plain)
            except ValueError as error:  # blocks that a power cut kept from the disk are zeros
                logger.warning(f"{path}: line {number} cannot be read ({error}): its answer is lost")
                answer = None
            yield answer, end

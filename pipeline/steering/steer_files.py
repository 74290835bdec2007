"""Read and write the files through which a user changes a live run: requests to rank 0, and its answers.

    steer/000001.json   a request: values of live keys, the user who asks, and the time; launch/steer.py creates it
    steer.jsonl         one answer per line: the step after which a request took effect and its changes, or why it was refused

Requests are numbered. A request's file is written under another name and then linked to its own, so it is complete when its
name appears. Two processes never get the same number, because a link fails if its name exists, on NFS too. Rank 0 answers
requests in the order of their numbers. To find requests it lists the folder, because an NFS client caches that a single name
does not exist; on NFS, rank 0 may see a request up to a minute late.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.files import small_files
from pipeline.files.small_files import Count, Moment
from pipeline.files.storage import NotOwn, RetryPolicy, open_own, retrying, sync
from pipeline.recipe.problems import RecipeError

FOLDER = "steer"
ANSWERS = "steer.jsonl"
NAME = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True)
class ChangeRequest:
    """A user's request to set live keys to new values."""

    number: int
    values: Mapping[str, Any]
    user: str
    host: str
    time: float  # unix seconds


@dataclass(frozen=True)
class _Request:
    """The contents of a request's file, whose name has its number."""

    values: dict[str, Any]
    user: str
    host: str
    time: Moment


@dataclass(frozen=True)
class KeyChange:
    """The change of one key, with its values as plain JSON values."""

    key: str
    old: Any
    new: Any
    submitted: Any  # the value in recipe.yaml at that time


@dataclass(frozen=True)
class ChangeAnswer:
    """The answer to a request."""

    request: int
    step: Count  # completed steps when it took effect: the next step is the first with the changes
    changes: tuple[KeyChange, ...]  # empty if it was refused
    user: str
    host: str
    asked: Moment
    time: Moment
    refused: str = ""  # why


def ask(run_dir: Path, values: Mapping[str, Any]) -> ChangeRequest:
    """Create the next request of a run, and return it. Raises OSError."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    number = max([0, *numbers(run_dir), *(answer.request for answer in answers(run_dir))]) + 1
    beside = folder / f".{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        while True:
            request = ChangeRequest(number, dict(values), getpass.getuser(), socket.gethostname(), time.time())
            with open(beside, "w") as file:
                file.write(json.dumps(asdict(request)))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(beside, path_of(run_dir, number))
            except FileExistsError:  # somebody else asked at the same time
                number += 1
                continue
            sync(folder)
            return request
    finally:
        beside.unlink(missing_ok=True)


def path_of(run_dir: Path, number: int) -> Path:
    """Return the file of a request."""
    return run_dir / FOLDER / f"{number:06d}.json"


def numbers(run_dir: Path) -> list[int]:
    """Return the numbers of all requests, answered or not, in order."""
    try:
        names = os.listdir(run_dir / FOLDER)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def read_request(run_dir: Path, number: int) -> ChangeRequest:
    """Return a request.

    Raises ValueError if the file is not a steering request of this user, FileNotFoundError if the request was withdrawn.
    """
    path = path_of(run_dir, number)
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            request = small_files.parsed(file.read(small_files.LONGEST), _Request, path)
    except (NotOwn, RecipeError) as error:
        raise ValueError(f"{path} is not a steering request of this user: {error}") from error
    return ChangeRequest(number, request.values, request.user, request.host, request.time)


def find_unanswered(run_dir: Path, past_answers: Iterable[ChangeAnswer]) -> list[int]:
    """Return the numbers of the requests without an answer, in order."""
    done = {answer.request for answer in past_answers}
    return [number for number in numbers(run_dir) if number not in done]


def answers(run_dir: Path) -> list[ChangeAnswer]:
    """Return all complete answers, oldest first: a last line may be incomplete. Raises RecipeError for a damaged line."""
    return list(small_files.lines(run_dir / ANSWERS, ChangeAnswer))


def write_answer(run_dir: Path, answer: ChangeAnswer, retry: RetryPolicy) -> None:
    """Append an answer, which is on disk when this returns. Raises StorageError."""
    path = run_dir / ANSWERS
    retrying(lambda: small_files.append(path, asdict(answer)), "writing a change of the run", path, retry)


def decode(line: Mapping[str, Any]) -> ChangeAnswer:
    """Return an answer from its JSON values."""
    return ChangeAnswer(**{**line, "changes": tuple(KeyChange(**change) for change in line["changes"])})

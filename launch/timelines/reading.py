"""The timelines of an attempt's ranks, on one clock, as spans of `pipeline.timeline`, whose docstring describes the files.

Each node's clock is corrected by what the checks of the nodes measured when the attempt began (nodes.json). Left as it is:
what they may have been wrong by, which `Rank.error_s` says, and what a clock drifted since then.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from launch.attempts import PastAttempt
from pipeline.config import Problem, RecipeError
from pipeline.timeline import CATEGORIES, WAITING, Merger, Span, span

REALMS = ("train", "generate", "reward")
BLOCK = 1 << 16


@dataclass(frozen=True)
class Rank:
    """One rank's file. Times are unix seconds of rank 0's clock."""

    path: Path
    rank: int
    realm: str
    engine: int | None  # its number, of a generate rank
    node: str
    began: float
    error_s: float | None  # how far off that may be, of other ranks'; None: it was not measured

    @property
    def name(self) -> str:
        """For people."""
        return f"engine {self.engine}, rank {self.rank}" if self.engine is not None else f"rank {self.rank}"

    @property
    def group(self) -> str:
        """Ranks that are shown together: those of an engine, else those of a realm on a node."""
        return f"engine {self.engine} on {self.node}" if self.engine is not None else self.node

    def spans(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[Span]:
        """In order, those that are between two times at least in part, cut there."""
        for line in self._lines(begin - self.began):
            if isinstance(line, list):
                if self.began + line[0] >= end:
                    return
                if part := span(line, self.began).part(begin, end):
                    yield part

    def steps(self) -> dict[int, tuple[float, float]]:
        """Step -> (begin, end), of those that rank 0 saw end in this attempt."""
        marks = [(line["step"], self.began + line["at"]) for line in self._lines() if isinstance(line, dict)]
        pairs = itertools.pairwise(marks)
        return {step: (begin, end) for (before, begin), (step, end) in pairs if step == before + 1}

    def _lines(self, after: float = float("-inf")) -> Iterator[Any]:
        """But the first; and, if `after` is given, about those that end later than so many seconds after the beginning."""
        with open(self.path, "rb") as file:
            file.readline()
            if after > 0:
                _skip(file, after)
            for text in file:
                line = _parsed(text)
                if line is not None:
                    yield line


def _parsed(text: bytes) -> Any:
    """None for a line that is just being written."""
    try:
        return json.loads(text) if text.endswith(b"\n") else None
    except ValueError:
        return None


def _skip(file: BinaryIO, after: float) -> None:
    """To a place at most some blocks before the first span that ends later: lines are in the order of their ends, nearly."""
    low, high = file.tell(), file.seek(0, os.SEEK_END)
    while high - low > 2 * BLOCK:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        line = _parsed(file.readline())
        ends = line[1] if isinstance(line, list) else line["at"] if line else float("inf")
        low, high = (middle, high) if ends < after else (low, middle)
    begin = max(0, low - BLOCK)  # a step's mark may come before the span that it falls into
    file.seek(begin)
    file.readline()


def ranks(attempt: PastAttempt) -> list[Rank]:
    """Those that have a timeline, in rank order. Raises RecipeError for a file that is none."""
    clocks = _clocks(attempt)
    found = []
    for path in sorted((attempt.folder / "timeline").glob("rank*.jsonl")):
        with open(path, "rb") as file:
            about = _parsed(file.readline())
        if about is None:
            continue  # it has just begun
        try:
            ahead, error = clocks.get(about["node"], (0.0, None))
            place = (about["rank"], about["realm"], about["engine"], about["node"])
            found.append(Rank(path, *place, about["began"] - ahead, error))
        except (TypeError, KeyError) as wrong:
            raise RecipeError(Problem("run", "bad-format", f"{path} is not a rank's timeline")) from wrong
    return sorted(found, key=lambda each: each.rank)


def attempt_with(attempts: list[list[Rank]], number: int | None) -> list[Rank]:
    """The latest that made a step, or any step; if none did, the latest. attempts: oldest first, at least one."""
    ended = [of for of in attempts if of[0].rank == 0 and (steps := of[0].steps()) and number in (None, *steps)]
    return (ended or attempts)[-1]


def _clocks(attempt: PastAttempt) -> dict[str, tuple[float, float | None]]:
    """Of each node (seconds that its clock is ahead of rank 0's, how wrong that may be); on a single node nothing is off."""
    try:
        nodes = json.loads((attempt.folder / "nodes.json").read_text())["nodes"]
    except FileNotFoundError:
        return {}
    if len(nodes) == 1:
        return dict.fromkeys(nodes, (0.0, 0.0))
    return {name: (node["clock_skew_s"] or 0.0, node["clock_error_s"]) for name, node in nodes.items()}


def precision(of: list[Rank]) -> str:
    """How well the ranks' clocks agree, for people."""
    errors = [rank.error_s for rank in of]
    if None in errors:
        return "the clocks of the nodes are taken as they are: how far they are apart was not measured"
    if not any(errors):
        return "all ranks share one clock"
    return f"clocks of nodes corrected, to ± {1e3 * max(errors):.2g} ms when the attempt began; not for what they drifted since"


# ---- a step -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What ranks did between two times."""

    number: int | None  # None: from the start, as no step has ended yet
    begin: float
    end: float
    rows: list[tuple[Rank, list[Span]]]

    @property
    def title(self) -> str:
        return "from the start; no step has ended yet" if self.number is None else f"step {self.number}"

    def categories(self) -> list[str]:
        """Those that took more than a thousandth of the time, in the order of CATEGORIES."""
        seconds: Counter[str] = Counter()
        for _, spans in self.rows:
            for each in spans:
                seconds.update(each.categories)
        return [key for key in CATEGORIES if seconds[key] > seconds.total() / 1000]

    def realms(self) -> dict[str, list[tuple[Rank, list[Span]]]]:
        named = {realm: [row for row in self.rows if row[0].realm == realm] for realm in REALMS}
        return {realm: rows for realm, rows in named.items() if rows}


def step_of(of: list[Rank], number: int | None, pixels: int) -> Step:
    """A step of an attempt, by default the last one that ended; before one did, all there is.

    Spans too short to be seen on so many pixels are merged. Raises RecipeError if the attempt did not make that step.
    """
    steps = of[0].steps() if of[0].rank == 0 else {}
    if number is None and not steps:
        begin, end = of[0].began, max((each.end for each in of[0].spans()), default=of[0].began + 1e-3)
        return Step(None, begin, end, rows(of, begin, end, pixels))
    number = max(steps) if number is None else number
    if number not in steps:
        raise _unknown(of, number, steps)
    begin, end = steps[number]
    return Step(number, begin, end, rows(of, begin, end, pixels))


def window(of: list[Rank], first: int, last: int) -> tuple[float, float]:
    """When a step of an attempt began and a later one ended. Raises RecipeError if the attempt did not make both."""
    steps = of[0].steps() if of[0].rank == 0 else {}
    for number in (first, last):
        if number not in steps:
            raise _unknown(of, number, steps)
    return steps[first][0], steps[last][1]


def _unknown(of: list[Rank], number: int, steps: dict[int, tuple[float, float]]) -> RecipeError:
    known = f"steps {min(steps)} to {max(steps)}" if steps else "no step"
    message = f"step {number} is not in the timeline of attempt {of[0].path.parents[1].name}, which has {known}"
    return RecipeError(Problem("step", "no-such-step", message))


def rows(of: list[Rank], begin: float, end: float, pixels: int) -> list[tuple[Rank, list[Span]]]:
    return [(rank, list(merged(rank.spans(begin, end), (end - begin) / pixels))) for rank in of]


def merged(spans: Iterator[Span], resolution: float) -> Iterator[Span]:
    merger = Merger(resolution)
    for each in spans:
        yield from merger.take(each)
    yield from merger.rest()


def idle_share(rows: list[tuple[Rank, list[Span]]]) -> float:
    """Seconds of waiting, of all seconds."""
    seconds = [(sum(each.categories.get(key, 0.0) for key in WAITING), each.seconds) for _, spans in rows for each in spans]
    lived = sum(whole for _, whole in seconds)
    return sum(waited for waited, _ in seconds) / lived if lived else 0.0

"""Read the trace events of an attempt's ranks as spans on one clock. `pipeline/observe/rank_timeline.py` describes the files.

Each node's clock is corrected by the offset that the node checks measured when the attempt began (nodes.json). Two errors
remain: the error of that measurement (`RankTrace.error_s`), and the drift of the clock since then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec

from launch.runs import run_files
from launch.runs.attempts import AttemptFolder
from pipeline.config import Problem, RecipeError
from pipeline.files import small_files
from pipeline.files.small_files import LONGEST, Count, Moment
from pipeline.observe.spans import CATEGORIES, WAITING, Merger, Span, span
from pipeline.recipe import user_files

REALMS = ("train", "generate", "reward", "judge", "environment")
BLOCK = 1 << 16


@dataclass(frozen=True)
class RankTrace:
    """The file with one rank's trace events. Times are unix seconds of rank 0's clock."""

    path: Path
    rank: int
    realm: str
    engine: int | None  # number of a generate rank's engine
    node: str
    began: float
    ahead_s: float  # seconds that its node's clock is ahead of rank 0's
    error_s: float | None  # error bound of `ahead_s`; None: not measured

    @property
    def name(self) -> str:
        """Return the rank's name for display."""
        return f"engine {self.engine}, rank {self.rank}" if self.engine is not None else f"rank {self.rank}"

    @property
    def group(self) -> str:
        """Return the name of the group that the rank is shown in: its engine, or else its node."""
        return f"engine {self.engine} on {self.node}" if self.engine is not None else self.node

    def spans(self, begin: float = float("-inf"), end: float = float("inf")) -> Iterator[Span]:
        """Yield, in order, the spans that overlap with the window from `begin` to `end`, cut at its ends."""
        for event in self._events(begin + self.ahead_s):
            if event["ph"] == "X":
                whole_span = span(event, -self.ahead_s)
                if whole_span.begin >= end:
                    return
                if part := whole_span.part(begin, end):
                    yield part

    def steps(self) -> dict[int, tuple[float, float]]:
        """Return step -> (begin, end), for steps that ended in this attempt. Only rank 0 records steps."""
        marks = [(event["args"]["step"], event["ts"] / 1e6 - self.ahead_s) for event in self._events() if event["ph"] == "i"]
        pairs = itertools.pairwise(marks)
        return {step: (begin, end) for (before, begin), (step, end) in pairs if step == before + 1}

    def _events(self, after: float = float("-inf")) -> Iterator[dict[str, Any]]:
        """Yield all events except the first. With `after`, skip most events that end before it.

        after: unix seconds of the rank's own clock.
        """
        with user_files.open_file(self.path) as file:
            file.readline(LONGEST)
            _skip(file, 1e6 * after)
            for text in small_files.whole_lines(file, self.path):
                if (event := _parse_event(text)) is not None:
                    yield event


Microseconds = Annotated[int, msgspec.Meta(ge=0, le=10**17)]


class _Merged(msgspec.Struct):
    merged: Count
    seconds: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e9)]]


class _SpanEvent(msgspec.Struct, tag_field="ph", tag="X"):
    name: str
    ts: Microseconds
    dur: Microseconds
    args: _Merged | msgspec.UnsetType = msgspec.UNSET


class _Ended(msgspec.Struct):
    step: Count


class _StepEvent(msgspec.Struct, tag_field="ph", tag="i"):
    ts: Microseconds
    args: _Ended


class _About(msgspec.Struct):
    rank: Count
    realm: Literal["train", "generate", "reward", "judge", "environment"]
    engine: Count | None
    node: str
    began: Moment


class _RankEvent(msgspec.Struct, tag_field="ph", tag="M"):
    args: _About


def _parse_event(text: bytes) -> dict[str, Any] | None:
    """Return the event on a line of a trace; None for a line that is incomplete or damaged. Not for the file's first line."""
    if not text.endswith(b"\n"):
        return None
    with contextlib.suppress(RecipeError):
        event = small_files.parsed(_event_of(text), dict[str, Any], "")
        small_files.checked(event, _StepEvent if event.get("ph") == "i" else _SpanEvent, "")
        return event
    return None


def _event_of(line: bytes) -> bytes:
    return line.removeprefix(b"[").removesuffix(b",\n")


def _skip(file: BinaryIO, after: float) -> None:
    """Seek to a line a few blocks or less before the first event that ends later than `after`.

    after: microseconds of the rank's own clock. Lines are nearly in the order in which their events end.
    """
    first = low = file.tell()
    high = file.seek(0, os.SEEK_END)
    while high - low > 2 * BLOCK:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        event = _parse_event(file.readline())
        ends = event["ts"] + event.get("dur", 0) if event else float("inf")
        low, high = (middle, high) if ends < after else (low, middle)
    file.seek(max(first, low - BLOCK))  # a step's mark may come before the span that it falls into
    if file.tell() > first:
        file.readline()


# ---- an attempt -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptTrace:
    """The traces of all ranks in one attempt of a run."""

    attempt: AttemptFolder
    ranks: list[RankTrace]  # in order, at least one

    @cached_property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Return step -> (begin, end), for steps that ended in this attempt."""
        return self.ranks[0].steps()

    @property
    def precision(self) -> str:
        """Return a text about how well the ranks' clocks agree."""
        errors = [rank.error_s for rank in self.ranks if rank.error_s is not None]
        if len(errors) < len(self.ranks):
            return "the clocks of the nodes are not corrected, because their offsets were not measured"
        if not any(errors):
            return "all ranks share one clock"
        measured = f"to ± {1e3 * max(errors):.2g} ms when the attempt began"
        return f"clocks of nodes corrected, {measured}; later drift is not corrected"

    def window(self, first: int, last: int) -> tuple[float, float]:
        """Return (begin of step `first`, end of step `last`). Raises RecipeError if the attempt lacks either step."""
        for number in (first, last):
            if number not in self.steps:
                known = f"steps {min(self.steps)} to {max(self.steps)}" if self.steps else "no step"
                message = f"step {number} is not in the timeline of attempt {self.attempt.name}, which has {known}"
                raise RecipeError(Problem("step", "no-records", message))
        return self.steps[first][0], self.steps[last][1]

    def step(self, number: int | None, pixels: int) -> StepSpans:
        """Return the spans of a step.

        number: None for the last step that ended or, if no step has ended, for all spans since the attempt began. pixels: the
        width at which the spans are drawn; spans too short to be seen at this width are merged. Raises RecipeError if the
        attempt did not make the step.
        """
        if number is None and not self.steps:
            begin = self.ranks[0].began
            end = max((span.end for span in self.ranks[0].spans()), default=begin + 1e-3)
        else:
            number = max(self.steps) if number is None else number
            begin, end = self.window(number, number)
        resolution = (end - begin) / pixels
        rows = [(rank, list(_merge_short_spans(rank.spans(begin, end), resolution))) for rank in self.ranks]
        return StepSpans(number, begin, end, rows)


def attempt_traces(attempts: Iterable[AttemptFolder]) -> list[AttemptTrace]:
    """Return the traces of those attempts that have a timeline. Raises RecipeError for a file that is not a timeline."""
    return [AttemptTrace(attempt, ranks) for attempt in attempts if (ranks := _ranks(attempt))]


def trace_with_step(traces: list[AttemptTrace], number: int | None) -> AttemptTrace:
    """Return the latest attempt that made step `number` (None: any step). If there is none, return the latest attempt.

    traces: the attempts, oldest first, at least one.
    """
    ended = [trace for trace in traces if trace.steps and number in (None, *trace.steps)]
    return (ended or traces)[-1]


def _ranks(attempt: AttemptFolder) -> list[RankTrace]:
    clocks = _clocks(attempt)
    traces = []
    for path in sorted((attempt.folder / "timeline").glob("rank*.jsonl")):
        with user_files.open_file(path) as file:
            first = file.readline(LONGEST)
        if not first.endswith(b"\n") or b'"ph":"M"' not in first.replace(b" ", b""):
            continue  # it has just begun, or is an older version's
        about = small_files.parsed(_event_of(first), _RankEvent, path).args
        ahead, error = clocks.get(about.node, (0.0, None))
        traces.append(RankTrace(path, about.rank, about.realm, about.engine, about.node, about.began - ahead, ahead, error))
    return sorted(traces, key=lambda trace: trace.rank)


def _clocks(attempt: AttemptFolder) -> dict[str, tuple[float, float | None]]:
    """Return node -> (seconds by which its clock is ahead of rank 0's, error bound of these seconds or None).

    With a single node both are 0.
    """
    nodes = run_files.nodes(attempt.folder)
    if len(nodes) == 1:
        return dict.fromkeys(nodes, (0.0, 0.0))
    return {name: (node.get("clock_skew_s") or 0.0, node.get("clock_error_s")) for name, node in nodes.items()}


def _merge_short_spans(spans: Iterator[Span], resolution: float) -> Iterator[Span]:
    merger = Merger(resolution)
    for spent in spans:
        yield from merger.take(spent)
    yield from merger.rest()


# ---- a step -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepSpans:
    """The spans of all ranks in one step, or from the start if no step has ended."""

    number: int | None  # None: from the start, as no step has ended yet
    begin: float
    end: float
    rows: list[tuple[RankTrace, list[Span]]]

    @property
    def title(self) -> str:
        """Return the step's name for headings."""
        return "from the start; no step has ended yet" if self.number is None else f"step {self.number}"

    def categories(self) -> list[str]:
        """Return the categories that took more than a thousandth of the ranks' time, in the order of CATEGORIES."""
        seconds: Counter[str] = Counter()
        for _, spans in self.rows:
            for spent in spans:
                seconds.update(spent.categories)
        return [key for key in CATEGORIES if seconds[key] > seconds.total() / 1000]

    def realms(self) -> dict[str, list[tuple[RankTrace, list[Span]]]]:
        """Return component -> (rank, spans) of each of its ranks, without components that have no ranks here."""
        named = {realm: [row for row in self.rows if row[0].realm == realm] for realm in REALMS}
        return {realm: rows for realm, rows in named.items() if rows}


def idle_share(rows: list[tuple[RankTrace, list[Span]]]) -> float:
    """Return the share of the ranks' seconds in which they waited."""
    seconds = [(sum(span.categories.get(key, 0.0) for key in WAITING), span.seconds) for _, spans in rows for span in spans]
    lived = sum(whole for _, whole in seconds)
    return sum(waited for waited, _ in seconds) / lived if lived else 0.0

"""All spans of a run as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show.

The format: "Trace Event Format", Google, 2016; events may come in any order, so ranks are written one after another, each as it
is read, and the memory does not grow with the run. Times are microseconds since the first attempt's beginning.

A process is an engine, or the ranks of a realm on one node; a thread is a rank. A rank's verbs are slices, its phases slices
within them. The process "run" has the steps, what the run did before the first of them, and the idle share of each realm as
counters. Arrows lead from rank 0's sending of
weights to their receiving, by the engines' first ranks.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from launch.past_run import Columns
from launch.starting import Stage
from launch.timelines.reading import REALMS, Rank
from pipeline.timeline import Span

COLOURS = {
    "rollout": "thread_state_running",
    "environment": "rail_load",
    "forward": "rail_animation",
    "step": "rail_response",
    "refit": "good",
    "save": "bad",
    "coordinate": "vsync_highlight_color",
    "other": "generic_work",
    "wait": "grey",
}
"""Of chrome://tracing's reserved names; Perfetto has colours of its own."""
MOST_ARROWS = 64
"""Engines with arrows at each refit."""
Event = dict[str, Any]


@dataclass
class Trace:
    """Where events are written."""

    file: TextIO
    zero: float  # unix seconds
    events: int = 0
    _processes: dict[tuple[str, str], int] = field(default_factory=dict)
    _threads: set[tuple[int, int]] = field(default_factory=set)

    def begin(self) -> None:
        self.file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self.put(_named("process_name", 0, name="run"), _named("thread_name", 0, 0, name="steps"))

    def put(self, *events: Event) -> None:
        for event in events:
            self.file.write((",\n" if self.events else "") + json.dumps(event, separators=(",", ":")))
            self.events += 1

    def end(self, **about: Any) -> None:
        self.file.write(f'\n],"otherData":{json.dumps(about)}}}\n')

    def us(self, moment: float) -> float:
        return round(1e6 * (moment - self.zero), 1)

    def place(self, rank: Rank) -> tuple[int, int]:
        """(process, thread) of a rank, which are named the first time."""
        key = (rank.realm, rank.group)
        if key not in self._processes:
            pid = self._processes[key] = len(self._processes) + 1
            order = 100_000 * (REALMS.index(rank.realm) + 1) + rank.rank
            self.put(_named("process_name", pid, name=f"{rank.realm}: {rank.group}"))
            self.put(_named("process_sort_index", pid, sort_index=order))
        pid = self._processes[key]
        if (pid, rank.rank) not in self._threads:
            self._threads.add((pid, rank.rank))
            self.put(_named("thread_name", pid, rank.rank, name=f"rank {rank.rank}"))
            self.put(_named("thread_sort_index", pid, rank.rank, sort_index=rank.rank))
        return pid, rank.rank


def _named(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def add(trace: Trace, of: list[Rank], window: tuple[float, float]) -> None:
    """An attempt's ranks, between two times."""
    sent: list[Span] = []  # rank 0's, in order
    arrows = 0
    for rank in of:
        received: list[Span] = []
        leads = rank.engine is not None and all(each.rank >= rank.rank for each in of if each.engine == rank.engine)
        for verb, spans in _verbs(rank.spans(*window)):
            if verb == "send" and rank.rank == 0:
                sent.append(_whole(spans))
            elif verb == "receive" and leads and arrows < MOST_ARROWS:
                received.append(_whole(spans))
            trace.put(*_slices(trace, *trace.place(rank), verb, spans))
        arrows += bool(received)
        for each in received:
            _arrow(trace, of[0], rank, sent, each)


def _verbs(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Spans of one verb, one right after another."""
    row: list[Span] = []
    for each in spans:
        if row and (each.name[0] != row[0].name[0] or each.begin - row[-1].end > 1e-5):
            yield row[0].name[0], row
            row = []
        row.append(each)
    if row:
        yield row[0].name[0], row


def _length(span: Span) -> float:
    return span.seconds


def _whole(spans: list[Span]) -> Span:
    return Span(spans[0].begin, spans[-1].end)


def _slices(trace: Trace, pid: int, tid: int, verb: str, spans: list[Span]) -> Iterator[Event]:
    """The verb, and its phases within it. What took no longer than the format tells is left out."""

    def made(name: str, begin: float, end: float, category: str, **args: Any) -> Event:
        at = trace.us(begin)
        event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at}
        event |= {"dur": round(trace.us(end) - at, 1), "cname": COLOURS[category]}
        return event | ({"args": args} if args else {})

    yield made("wait" if verb == "idle" else verb, spans[0].begin, spans[-1].end, max(spans, key=_length).category)
    for each in spans:
        phase = each.name[1]
        merged = {"merged": each.count, **{f"{key} (s)": value for key, value in each.categories.items()}}
        if phase or each.count > 1:
            args = merged if each.count > 1 else {}
            yield made(phase or "several", each.begin, each.end, each.category, **args)


def _arrow(trace: Trace, first: Rank, rank: Rank, sent: list[Span], received: Span) -> None:
    """From the sending that overlaps most with it, if there is one."""
    at = bisect.bisect_left([each.end for each in sent], received.begin)
    near = sent[at : at + 3]
    overlaps = [min(each.end, received.end) - max(each.begin, received.begin) for each in near]
    if not near or max(overlaps) <= 0:
        return
    send = near[overlaps.index(max(overlaps))]
    common = {"name": "weights", "cat": "refit", "id": trace.events}
    (pid, tid), (its, of) = trace.place(first), trace.place(rank)
    begin = max(send.begin, min(send.end, received.begin))
    trace.put(
        {**common, "ph": "s", "pid": pid, "tid": tid, "ts": trace.us(begin)},
        {**common, "ph": "f", "bp": "e", "pid": its, "tid": of, "ts": trace.us(max(begin, received.end - 1e-6))},
    )


def add_startup(trace: Trace, stages: Iterable[Stage], window: tuple[float, float]) -> None:
    """What a run did before its first step, as slices; of what was between two times."""
    for stage in stages:
        within = stage.ended is not None and window[0] <= stage.began and stage.ended <= window[1]
        if within and stage.began >= trace.zero:
            at = trace.us(stage.began)
            trace.put(_named("thread_name", 0, 1, name="start-up"))
            slice_ = {"ph": "X", "name": stage.name, "cat": "start-up", "pid": 0, "tid": 1, "ts": at}
            trace.put({**slice_, "dur": round(trace.us(stage.ended) - at, 1)})


def add_steps(trace: Trace, steps: dict[int, tuple[float, float]], metrics: Columns) -> None:
    """Steps as slices, and idle shares, which are of the whole step, from its beginning on."""
    shares = {key: dict(zip(*column, strict=True)) for key, column in metrics.columns.items() if key.startswith("idle/")}
    for step, (begin, end) in steps.items():
        at = trace.us(begin)
        slice_ = {"ph": "X", "name": f"step {step}", "cat": "step", "pid": 0, "tid": 0, "ts": at}
        trace.put({**slice_, "dur": round(trace.us(end) - at, 1)})
        of = {key.partition("/")[2]: value[step] for key, value in shares.items() if step in value}
        if of:
            trace.put({"ph": "C", "name": "idle share", "pid": 0, "tid": 0, "ts": at, "args": of})

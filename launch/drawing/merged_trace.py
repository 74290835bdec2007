"""Merge the spans of all ranks into one file of Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing show.

In the trace, a process is an engine, or the ranks of a component ("realm") on one node; a thread is a rank. The process "run"
contains the steps, the stages of the start-up, and the idle share of each realm as counters. Arrows lead from spans in which
rank 0 sends weights to spans in which the engines' first ranks receive them. Times are microseconds since 1970 by rank 0's
clock.

Each rank is written while it is read, so that the memory that this takes does not grow with the run.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.drawing.rank_traces import REALMS, AttemptTrace, RankTrace
from launch.runs import startup_stages
from launch.runs.run_folder import MetricColumns, RunFolder
from pipeline.observe.spans import Span, us

RUN = 0
"""Process id of "run". A process of ranks has the id 1 + its first rank."""
MOST_ARROWS = 64
"""Maximum number of engines to which arrows lead in each refit."""
Event = dict[str, Any]
Window = tuple[float, float]


def write(path: Path, run: RunFolder, recorded: list[AttemptTrace], window: Window = (float("-inf"), float("inf"))) -> int:
    """Write the events of a run within `window` to the file `path`, and return their number. Raises OSError.

    recorded: the attempts with a timeline. window: (begin, end) in unix seconds of rank 0's clock.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    count = 0
    with opened(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for count, event in enumerate(_events(run, recorded, window), 1):
            file.write(("\n" if count == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
        about = {"run": run.folder.name, "clocks": recorded[-1].precision}
        file.write(f'\n],"otherData":{json.dumps(about)}}}\n')
    return count


def _events(run: RunFolder, recorded: list[AttemptTrace], window: Window) -> Iterator[Event]:
    yield _metadata_event("process_name", RUN, name="run")
    metrics = run.metrics()
    for attempt in recorded:
        yield from _ranks(attempt.ranks, window)
        yield from _start_up(attempt, max(window[0], recorded[0].ranks[0].began), window[1])
        yield from _steps(
            {step: at for step, at in attempt.steps.items() if window[0] <= at[0] and at[1] <= window[1]}, metrics
        )


def _metadata_event(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _slice(name: str, category: str, begin: float, end: float, tid: int) -> Event:
    at = us(begin)
    return {"ph": "X", "name": name, "cat": category, "pid": RUN, "tid": tid, "ts": at, "dur": us(end) - at}


def _ranks(of: list[RankTrace], window: Window) -> Iterator[Event]:
    """Yield the events of an attempt's ranks: names of processes and threads, spans, and arrows between spans."""
    processes: dict[tuple[str, str], int] = {}
    engines: dict[int | None, int] = {None: 0}  # engine -> its first rank
    sent: list[Window] = []
    for rank in of:
        group = (rank.realm, rank.group)
        if group not in processes:
            processes[group] = 1 + rank.rank
            yield _metadata_event("process_name", 1 + rank.rank, name=f"{rank.realm}: {rank.group}")
            order = 100_000 * (REALMS.index(rank.realm) + 1) + rank.rank
            yield _metadata_event("process_sort_index", 1 + rank.rank, sort_index=order)
        pid, tid = processes[group], rank.rank
        yield _metadata_event("thread_name", pid, tid, name=f"rank {tid}")
        yield _metadata_event("thread_sort_index", pid, tid, sort_index=tid)
        first = engines.setdefault(rank.engine, tid) == tid and len(engines) <= MOST_ARROWS + 1
        received: list[Window] = []
        for span in rank.spans(*window):
            yield span.event(pid, tid)
            if span.name[0] == "send" and tid == 0:
                _extend(sent, span)
            elif span.name[0] == "receive" and first:
                _extend(received, span)
        for number, window_received in enumerate(received):
            yield from _arrow(
                f"{of[0].began:.0f}/{tid}/{number}", sent, processes[of[0].realm, of[0].group], window_received, (pid, tid)
            )


def _extend(times: list[Window], span: Span) -> None:
    """Append the window of a span to `times`, or lengthen the last window if the span directly follows it."""
    begin = times.pop()[0] if times and span.begin - times[-1][1] < 1e-5 else span.begin
    times.append((begin, span.end))


def _arrow(name: str, sent: list[Window], source: int, received: Window, to: tuple[int, int]) -> Iterator[Event]:
    """Yield both ends of an arrow from the window of `sent` that overlaps most with `received`; nothing if none overlaps.

    source: rank 0's process, where weights are sent. to: the (process, thread) that receives them.
    """
    near = sent[(at := bisect.bisect_left([end for _, end in sent], received[0])) : at + 3]
    begin, end = max(
        near, key=lambda candidate: min(candidate[1], received[1]) - max(candidate[0], received[0]), default=(0.0, 0.0)
    )
    if min(end, received[1]) <= max(begin, received[0]):
        return
    common = {"name": "weights", "cat": "refit", "id": name}
    leaves = max(begin, received[0])
    yield {**common, "ph": "s", "pid": source, "tid": 0, "ts": us(leaves)}
    yield {**common, "ph": "f", "bp": "e", "pid": to[0], "tid": to[1], "ts": us(max(leaves, received[1] - 1e-6))}


def _start_up(of: AttemptTrace, begin: float, end: float) -> Iterator[Event]:
    """Yield the stages before an attempt's first step that lie between `begin` and `end`."""
    for stage in startup_stages.of_attempt(of.attempt):
        if stage.ended is not None and begin <= stage.began and stage.ended <= end:
            yield _metadata_event("thread_name", RUN, 1, name="start-up")
            yield _slice(stage.name, "start-up", stage.began, stage.ended, 1)


def _steps(steps: dict[int, Window], metrics: MetricColumns) -> Iterator[Event]:
    """Yield a slice for each step, and at its beginning a counter with each realm's idle share in this step."""
    yield _metadata_event("thread_name", RUN, 0, name="steps")
    shares = {key: dict(zip(*column, strict=True)) for key, column in metrics.columns.items() if key.startswith("idle/")}
    for step, (begin, end) in steps.items():
        yield _slice(f"step {step}", "step", begin, end, 0)
        of = {key.partition("/")[2]: value[step] for key, value in shares.items() if step in value}
        if of:
            yield {"ph": "C", "name": "idle share", "pid": RUN, "tid": 0, "ts": us(begin), "args": of}

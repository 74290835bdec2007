"""What this rank did when, and which share of the time it waited.

    timeline = Timeline(about, realms)      # every rank; World.phase tells it what the rank does: `enter`
    timeline.write(folder)                  # into folder/timeline/rank00000.jsonl, by a thread
    account = timeline.account()            # since the last one; goes with every reply to rank 0 ...
    timeline.heard(realm, account)          # ... which hears of all, or of sums of several ranks
    timeline.step_ended(step)               # rank 0: {"idle/train": 0.2, ...} since the call before

A rank does one thing at a time, so a file is a row of spans without gaps. Its first line is `about` with the unix second at
which it begins; each other line is one of

    [begin, end, verb, phase]                                    seconds after the file's beginning
    [begin, end, verb, phase, count, {category: seconds}]        so many spans merged; named as most of their time
    {"step": 12, "at": 345.6}                                    rank 0: when a step ended

Times are a monotonic clock's with one offset, that of the wall clock at the beginning: they never jump. Within a second of a
change the file's end is written anew, with what is under way; if that only lasts longer, every world size / 64 seconds, which
spares a file system that thousands of ranks share. So a rank that is killed loses what it began in the last second, and does
not say how much longer than that it was at what it did.

A file is bounded by merging. What interrupts a span for less than the resolution is merged with it; an engine's 50 steps a
second with glances at its mail between them are one span. The resolution is 10 ms and doubles with every 4 MB, so that a file
grows by 4 MB at most each time the run's length doubles.

A rank waits if it has no verb, or is in a phase that begins with "wait", or only environments are at work on its episodes. One
that waits inside a collective, for other ranks to arrive there, cannot be told from one that computes: it counts as busy.
Where train and generate ranks share GPUs, the one waits while the other works, as their shares say.

Left out: what several threads of a rank do, and the GPU's own times. `launch/timeline.py` merges the files. What it costs says
`python -m tests.benchmarks.timeline_cost`: some 0.1% of a CPU at 200 changes a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FLUSH_S = 1.0
QUIET_RANKS_PER_S = 64
"""Of a run whose ranks all have nothing new, so many write each second that they still do what they did."""
RESOLUTION_S = 0.01
DOUBLING_BYTES = 4 << 20
MOST_UNWRITTEN = 10_000
"""Lines that wait for a disk which does not take them; the oldest are given up."""
MOST_NAMES = 32
"""Of one merged span; what else it is made of goes by its verb alone."""
CLOSE_S = 5.0
"""How long the end of a run waits for a disk that hangs."""

CATEGORIES = ("rollout", "environment", "forward", "step", "refit", "save", "coordinate", "other", "wait")
WAITING = ("wait", "environment")
OF_VERB = {
    "idle": "wait",
    **dict.fromkeys(("rollout", "drain", "snapshot", "cut"), "rollout"),
    **dict.fromkeys(("forward", "estimate", "standardize", "evaluate", "score"), "forward"),
    "step": "step",
    **dict.fromkeys(("send", "receive", "commit"), "refit"),
    **dict.fromkeys(("save", "written", "restore", "export"), "save"),
    "coordinate": "coordinate",
}
"""All other verbs are "other"."""
ENVIRONMENTS = ("environment", "reward")
"""Phases of a rollout in which no engine is stepped."""


@cache
def category(verb: str, phase: str) -> str:
    """One of CATEGORIES."""
    if phase.startswith("wait"):
        return "wait"
    found = OF_VERB.get(verb, "other")
    return "environment" if found == "rollout" and phase in ENVIRONMENTS else found


Account = tuple[float, float]
"""Seconds that one or more ranks have waited, of those that they have lived."""


class Timeline:
    """`enter`, `account`, `heard` and `step_ended` are the main thread's."""

    def __init__(self, about: Mapping[str, Any], realms: Mapping[str, tuple[int, ...]]):
        """about: {"rank", "realm", "engine": its number or None, "node"}. realms: name -> ranks."""
        self._rank = about["rank"]
        self._realms = {name: ranks for name, ranks in realms.items() if ranks}
        self._began = time.monotonic()
        self._about = {**about, "began": time.time()}
        self._now = (self._began, "join", "")  # (since, verb, phase)
        self._waited = 0.0
        self._told: Account = (0.0, 0.0)  # by `account`
        self._heard: dict[str, Account] | None = None  # of each realm since the last step's end; None: there was none yet
        self._ended: deque[Event] = deque(maxlen=100_000)  # a thread that hangs must not cost the memory
        self._writer: Writer | None = None
        self._quiet = max(FLUSH_S, sum(map(len, self._realms.values())) / QUIET_RANKS_PER_S)

    def enter(self, verb: str, phase: str) -> None:
        """From now on the rank does this."""
        now = time.monotonic()
        since, was, in_phase = self._now
        if category(was, in_phase) in WAITING:
            self._waited += now - since
        self._ended.append((since - self._began, now - self._began, was, in_phase))
        self._now = (now, verb, phase)

    def account(self) -> Account:
        """Since it was called before, or since the beginning."""
        now = time.monotonic()
        since, verb, phase = self._now
        waited = self._waited + (now - since if category(verb, phase) in WAITING else 0.0)
        before, self._told = self._told, (waited, now - self._began)
        return self._told[0] - before[0], self._told[1] - before[1]

    # ---- rank 0 -------------------------------------------------------------------------------------------------------------

    def heard(self, realm: str, account: Account) -> None:
        """An account that came with a reply."""
        if self._heard is not None:
            waited, lived = self._heard.get(realm, (0.0, 0.0))
            self._heard[realm] = (waited + account[0], lived + account[1])

    def step_ended(self, step: int) -> dict[str, float]:
        """The idle share of each realm since this was called before: the seconds its ranks waited, of those that they lived.

        A rank's part ends with its last reply; ranks that have not replied since then have none. {} the first time.
        """
        self._ended.append((time.monotonic() - self._began, step))
        self.heard(self._about["realm"], self.account())
        heard, self._heard = self._heard or {}, {}
        return {f"idle/{name}": heard[name][0] / heard[name][1] for name in self._realms if heard.get(name, (0, 0))[1] > 0}

    # ---- the file -----------------------------------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write from now on, what was before included."""
        path = folder / "timeline" / f"rank{self._rank:05d}.jsonl"
        self._writer = Writer(path, self._about, self.take, self._quiet)
        self._writer.start()

    def keep_none(self) -> None:
        """There will be no file. Idle shares need nothing of what has ended."""
        self._ended = deque(maxlen=0)

    def close(self) -> None:
        """All is in the file when this returns, if the disk takes it."""
        if self._writer:
            self._writer.stop()

    def take(self) -> tuple[list[Event], Event]:
        """For the writer: what ended since this was called before, and what is under way."""
        since, verb, phase = self._now  # first: what ends after this line is taken the next time, or is not under way
        ended = []
        with contextlib.suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        return ended, (since - self._began, time.monotonic() - self._began, verb, phase)


Event = tuple[float, float, str, str] | tuple[float, int]
"""(begin, end, verb, phase), or (at, step)."""


@dataclass
class Span:
    """One or more spans, one after another."""

    begin: float
    end: float
    names: dict[tuple[str, str], float] = field(default_factory=dict)  # (verb, phase) -> seconds
    count: int = 0
    categories: dict[str, float] = field(default_factory=dict)  # -> seconds

    @classmethod
    def of(cls, begin: float, end: float, verb: str, phase: str) -> Span:
        return cls(begin, end, {(verb, phase): end - begin}, 1, {category(verb, phase): end - begin})

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def name(self) -> tuple[str, str]:
        """The verb that took most of the time; and its phase, if one took most of that."""
        if len(self.names) == 1:
            return next(iter(self.names))
        verbs: dict[str, float] = {}
        for (verb, _), seconds in self.names.items():
            verbs[verb] = verbs.get(verb, 0.0) + seconds
        verb = max(verbs, key=verbs.get)
        phases = {phase: seconds for (of, phase), seconds in self.names.items() if of == verb}
        phase = max(phases, key=phases.get)
        return verb, phase if 2 * phases[phase] > verbs[verb] else ""

    @property
    def category(self) -> str:
        """That of most of its time."""
        return max(self.categories, key=self.categories.get)

    def likes(self, other: Span) -> bool:
        """Whether the other is more of the same."""
        (verb, phase), (its, in_phase) = self.name, other.name
        return verb == its and (phase == in_phase or (len(self.names) > 2 and not phase))

    def absorb(self, other: Span) -> None:
        """What comes right after."""
        self.end = other.end
        self.count += other.count
        for (verb, phase), seconds in other.names.items():
            name = (verb, phase) if (verb, phase) in self.names or len(self.names) < MOST_NAMES else (verb, "")
            self.names[name] = self.names.get(name, 0.0) + seconds
        for key, seconds in other.categories.items():
            self.categories[key] = self.categories.get(key, 0.0) + seconds

    def part(self, begin: float, end: float) -> Span | None:
        """What of it is between two times; of several spans each is taken to be spread evenly. None: nothing."""
        begin, end = max(self.begin, begin), min(self.end, end)
        if begin >= end:
            return None
        share = (end - begin) / self.seconds
        names, categories = ({key: share * seconds for key, seconds in of.items()} for of in (self.names, self.categories))
        return Span(begin, end, names, self.count, categories)

    def line(self) -> list[Any]:
        fields = [round(self.begin, 6), round(self.end, 6), *self.name]
        if self.count > 1:
            fields += [self.count, {key: round(seconds, 6) for key, seconds in self.categories.items()}]
        return fields


def span(line: list[Any], later: float = 0.0) -> Span:
    """What `Span.line` made, so many seconds later. Of merged spans only the name of most of their time is known."""
    begin, end, verb, phase, *merged = line
    found = Span.of(begin + later, end + later, verb, phase)
    if merged:
        found.count, found.categories = merged
    return found


class Merger:
    """Spans in, fewer spans out: all but the first last for `resolution` at least, and no second is lost."""

    def __init__(self, resolution: float = RESOLUTION_S):
        self.resolution = resolution
        self._span: Span | None = None
        self._short: Span | None = None  # what follows it, and is shorter than the resolution

    def take(self, span: Span) -> Iterator[Span]:
        """Those that nothing can be merged with any more."""
        if self._span is None:
            self._span = span
            return
        if self._span.likes(span) and (self._short is None or span.seconds >= self.resolution):
            self._close()
            self._span.absorb(span)
            return
        if self._short:
            self._short.absorb(span)
        else:
            self._short = span
        if self._short.seconds < self.resolution:
            return
        if self._span.likes(self._short):
            self._close()
        else:
            yield self._span
            self._span, self._short = self._short, None

    def _close(self) -> None:
        if self._short:
            self._span.absorb(self._short)
            self._short = None

    def rest(self) -> Iterator[Span]:
        """Those that may yet grow."""
        return filter(None, (self._span, self._short))


class Writer:
    """The thread that keeps a timeline's file. A disk that does not take it costs the file alone; it is told once."""

    def __init__(
        self,
        path: Path,
        about: dict[str, Any],
        take: Callable[[], tuple[list[Event], Event]],
        quiet: float = FLUSH_S,
    ):
        """quiet: seconds after which it is written again that the same is still under way."""
        self._path = path
        self._take = take  # what ended, and what is under way
        self._quiet = quiet
        self._told = -math.inf  # until when the file has what is under way
        self._merger = Merger()
        self._lines = [about]  # that will not change any more, and are not written yet
        self._at = 0  # where in the file they go
        self._end = 0  # of the file, at most
        self._file: int | None = None
        self._failing = False
        self._lost = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_S):
            self.flush()
        self._quiet = 0.0
        self.flush()

    def flush(self) -> None:
        ended, under_way = self._take()
        if not ended and not self._lines and under_way[1] < self._told + self._quiet:
            return
        for event in ended:
            if len(event) == 2:
                self._lines.append({"step": event[1], "at": round(event[0], 6)})
            else:
                self._lines += [span.line() for span in self._merger.take(Span.of(*event))]
        tail = [span.line() for span in self._merger.rest()]
        if not any(len(event) == 4 and event[0] >= under_way[0] for event in ended):
            tail.append(Span.of(*under_way).line())
        settled, rest = _text(self._lines), _text(tail)
        try:
            self._put(settled + rest)
        except OSError as error:
            self._give_up(error)
            return
        if self._failing:
            self._tell(f"can be written again; {self._lost} lines are lost")
            self._failing = False
        self._at += len(settled)
        self._lines = []
        self._told = under_way[1]
        self._merger.resolution = RESOLUTION_S * 2 ** (self._at // DOUBLING_BYTES)

    def _put(self, data: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            self._end = os.fstat(self._file).st_size
        at, rest = self._at, memoryview(data)
        self._end = max(self._end, at + len(rest))
        while rest:
            count = os.pwrite(self._file, rest, at)
            at, rest = at + count, rest[count:]
        if at < self._end:  # what was under way took more room
            os.ftruncate(self._file, at)
            self._end = at

    def _give_up(self, error: OSError) -> None:
        if not self._failing:
            self._failing, self._lost = True, 0
            self._tell(f"cannot be written ({error}); the run goes on without")
        about, lines = (self._lines[:1], self._lines[1:]) if self._at == 0 else ([], self._lines)
        self._lost += max(0, len(lines) - MOST_UNWRITTEN)
        self._lines = about + lines[-MOST_UNWRITTEN:]
        if self._file is not None:  # it may have gone stale
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _tell(self, what: str) -> None:
        print(f"hetstep: the timeline ({self._path}) {what}", flush=True)


def _text(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()

"""Spans of a rank's time: their categories, how they are merged, and their trace events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

RESOLUTION_S = 0.01
MOST_NAMES = 32
"""Names that a merged span keeps; the time of further names counts for their verb only."""

CATEGORIES = ("rollout", "environment", "forward", "step", "refit", "save", "coordinate", "other", "wait")
WAITING = ("wait", "environment")
VERB_CATEGORIES = {
    "idle": "wait",
    **dict.fromkeys(("rollout", "drain", "snapshot", "cut"), "rollout"),
    **dict.fromkeys(("forward", "estimate", "standardize", "evaluate", "score"), "forward"),
    "step": "step",
    **dict.fromkeys(("send", "receive", "commit"), "refit"),
    **dict.fromkeys(("save", "written", "restore", "export"), "save"),
    "coordinate": "coordinate",
}
"""Verb -> category; other verbs are "other"."""
ENVIRONMENTS = ("environment", "reward")
"""Phases of a rollout in which no engine is stepped."""


@cache
def category(verb: str, phase: str) -> str:
    """Return the category of an activity: an entry of CATEGORIES."""
    if phase.startswith("wait"):
        return "wait"
    name = VERB_CATEGORIES.get(verb, "other")
    return "environment" if name == "rollout" and phase in ENVIRONMENTS else name


@dataclass
class Span:
    """A time span of one activity, or of several successive spans that were merged into it."""

    begin: float
    end: float
    names: dict[tuple[str, str], float]  # (verb, phase) -> seconds
    count: int
    categories: dict[str, float]  # -> seconds

    @classmethod
    def of(cls, begin: float, end: float, verb: str, phase: str) -> Span:
        """Return a span of one verb and phase."""
        return cls(begin, end, {(verb, phase): end - begin}, 1, {category(verb, phase): end - begin})

    @property
    def seconds(self) -> float:
        """Duration in seconds, including merged spans."""
        return self.end - self.begin

    @property
    def name(self) -> tuple[str, str]:
        """(The verb with the most time, its phase with more than half of the verb's time, or "" if there is none)."""
        if len(self.names) == 1:
            return next(iter(self.names))
        verbs: dict[str, float] = {}
        for (verb, _), seconds in self.names.items():
            verbs[verb] = verbs.get(verb, 0.0) + seconds
        verb = max(verbs, key=verbs.__getitem__)
        phases = {phase: seconds for (name, phase), seconds in self.names.items() if name == verb}
        phase = max(phases, key=phases.__getitem__)
        return verb, phase if 2 * phases[phase] > verbs[verb] else ""

    @property
    def category(self) -> str:
        """The category with the most time."""
        return max(self.categories, key=self.categories.__getitem__)

    def same_activity(self, following: Span) -> bool:
        """Return whether the following span has the same verb and phase."""
        (verb, phase), (next_verb, next_phase) = self.name, following.name
        return verb == next_verb and (phase == next_phase or (len(self.names) > 2 and not phase))

    def absorb(self, following: Span) -> None:
        """Merge `following`, the span that follows directly, into this span."""
        self.end = following.end
        self.count += following.count
        for (verb, phase), seconds in following.names.items():
            name = (verb, phase) if (verb, phase) in self.names or len(self.names) < MOST_NAMES else (verb, "")
            self.names[name] = self.names.get(name, 0.0) + seconds
        for key, seconds in following.categories.items():
            self.categories[key] = self.categories.get(key, 0.0) + seconds

    def part(self, begin: float, end: float) -> Span | None:
        """Return the part of the span between two times, or None. Merged activities are assumed to be spread evenly."""
        begin, end = max(self.begin, begin), min(self.end, end)
        if begin >= end:
            return None
        share = (end - begin) / self.seconds
        names = {key: share * seconds for key, seconds in self.names.items()}
        categories = {key: share * seconds for key, seconds in self.categories.items()}
        return Span(begin, end, names, self.count, categories)

    def event(self, pid: int, tid: int, zero: float = 0.0) -> dict[str, Any]:
        """Return the trace event. zero: unix seconds at which the span's times are 0."""
        begin, end = us(zero + self.begin), us(zero + self.end)
        name = ": ".join(filter(None, self.name))
        event = {"ph": "X", "name": name, "cat": self.category, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin}
        if self.count > 1:
            seconds = {key: round(seconds, 6) for key, seconds in self.categories.items()}
            event["args"] = {"merged": self.count, "seconds": seconds}
        return event


def us(seconds: float) -> int:
    """Convert seconds to whole microseconds, the unit of trace events."""
    return round(1e6 * seconds)


def span(event: dict[str, Any], shift_s: float = 0.0) -> Span:
    """Return the span of a trace event that `Span.event` made, shifted by `shift_s`. Of a merged span only `name` is known."""
    begin = event["ts"] / 1e6 + shift_s
    verb, _, phase = event["name"].partition(": ")
    merged = Span.of(begin, begin + event["dur"] / 1e6, verb, phase)
    if "args" in event:
        merged.count, merged.categories = event["args"]["merged"], event["args"]["seconds"]
    return merged


class Merger:
    """Merges spans: every yielded span except the first lasts at least `resolution` seconds, and no time is lost."""

    def __init__(self, resolution: float = RESOLUTION_S):
        self.resolution = resolution
        self._span: Span | None = None
        self._short: Span | None = None  # follows it and is shorter than the resolution

    def take(self, span: Span) -> Iterator[Span]:
        """Add the next span, and yield the spans that can no longer be merged."""
        if self._span is None:
            self._span = span
            return
        if self._span.same_activity(span) and (self._short is None or span.seconds >= self.resolution):
            self._close()
            self._span.absorb(span)
            return
        if self._short:
            self._short.absorb(span)
        else:
            self._short = span
        if self._short.seconds < self.resolution:
            return
        if self._span.same_activity(self._short):
            self._close()
        else:
            yield self._span
            self._span, self._short = self._short, None

    def _close(self) -> None:
        if self._span and self._short:
            self._span.absorb(self._short)
            self._short = None

    def rest(self) -> Iterator[Span]:
        """Return the spans that may still be merged."""
        return filter(None, (self._span, self._short))

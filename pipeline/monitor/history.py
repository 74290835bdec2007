"""Keep the readings of every rank over the last steps, and the growth of their memory, for metrics and checks on rank 0."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.monitor.readings import AVERAGED, COUNT, COUNTERS, READINGS, SUM, TAKEN, Sample

LASTING = 3
"""Number of last steps over which readings are averaged, so that a rank is slow or waits only if it lasts."""
POINTS = 64
"""Points kept of a memory's size over the whole run; when there are more, every second one is dropped."""
LEAST_POINTS = 32
"""Least number of points from which a leak can be distinguished from a warm-up."""
STEADY = 0.8
STRAIGHT = 0.95
"""Least correlation between sizes and steps in a leak."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's readings over one step: levels, means of averaged levels, rates of counters per second, and their growth."""

    values: Mapping[str, float]
    grown: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepView:
    """A step: its metrics and all ranks."""

    step: int
    metrics: Mapping[str, float]
    ranks: Mapping[int, RankStep]

    def of(self, name: str, ranks: Iterable[int]) -> dict[int, float]:
        """Return rank -> reading `name`, for those of `ranks` that have it."""
        return {rank: self.ranks[rank].values[name] for rank in ranks if name in self.ranks.get(rank, NOTHING).values}


NOTHING = RankStep({}, {})


def between(before: Sample, after: Sample) -> RankStep:
    """Return the readings of a rank over the time between two of its samples."""
    seconds, count = after[TAKEN] - before[TAKEN], after[COUNT] - before[COUNT]
    values, grown = {}, {}
    for name, value in after.items():
        if name not in READINGS:
            continue
        if name in COUNTERS:
            if name in before:
                grown[name] = max(0.0, value - before[name])
                values[name] = grown[name] / seconds
        elif name in AVERAGED:
            total = after[SUM + name] - before.get(SUM + name, 0.0)
            values[name] = total / count if SUM + name in before else value
        else:
            values[name] = value
    return RankStep(values, grown)


@dataclass
class Growth:
    """Holds points (step, size of a memory in GB) over the whole run. When there are too many, every second one is dropped."""

    points: list[tuple[float, float]] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def add(self, step: float, size: float) -> None:
        """Add a point, or skip it: after points were dropped, new points are kept as rarely as the remaining ones."""
        if self.seen % self.stride == 0:
            self.points.append((step, size))
            if len(self.points) > POINTS:
                self.points, self.stride = self.points[::2], 2 * self.stride
        self.seen += 1

    def slope(self, least: float) -> float | None:
        """Return the growth in GB per step if the memory leaks, else None.

        A leak is steady growth of at least `least` GB over the later half of the run. Caches and allocators grow at the start
        of a run, ever more slowly. So the earlier half does not count, and in the fourth quarter the memory must grow at least
        STEADY times as fast as in the third. Sizes that rise and fall, or jump once, are no leak: they correlate too little
        with the step.
        """
        late = self.points[len(self.points) // 2 :]
        if len(self.points) < LEAST_POINTS or late[-1][1] - late[0][1] < least:
            return None
        middle = len(late) // 2
        third, last = _slope(late[: middle + 1]), _slope(late[middle:])
        if last <= 0 or last < STEADY * third or statistics.correlation(*zip(*late, strict=True)) < STRAIGHT:
            return None
        return _slope(late)


def _slope(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through the points."""
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


LEAKS = ("rss_gb", "children_gb", "gpu_memory_gb")


class History:
    """Holds the readings of the last steps of each rank, and the growth of its memories."""

    def __init__(
        self, components: Mapping[str, tuple[int, ...]], nodes: Mapping[int, str], engines: tuple[tuple[int, ...], ...],
        max_steps: int | None, runs_ahead: bool,
    ):  # fmt: skip
        """Begin without steps. components: name -> ranks. nodes: rank -> name. engines: the ranks of each engine."""
        self.components = {name: ranks for name, ranks in components.items() if ranks}
        self.nodes = nodes
        self.engines = engines
        self.max_steps = max_steps
        self.runs_ahead = runs_ahead
        self.step = 0  # the last one that has ended
        self.growth: dict[tuple[int, str], Growth] = {}
        self.now: dict[int, Sample] = {}  # the latest sample of each rank
        self._used: dict[int, Sample] = {}  # the sample that the latest step of each rank ends with
        self._latest: dict[int, deque[RankStep]] = {}  # the last LASTING steps of each rank that brought a new sample

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> StepView:
        """Add a step. A rank without a new sample has the readings of its step before."""
        for rank, sample in self.now.items():
            before = self._used.get(rank)
            if before is not None and sample[TAKEN] <= before[TAKEN]:
                continue
            if before is not None:
                self._latest.setdefault(rank, deque(maxlen=LASTING)).append(between(before, sample))
            self._used[rank] = sample
            for name in LEAKS:
                if name in sample:
                    self.growth.setdefault((rank, name), Growth()).add(step, sample[name])
        self.step = step
        return StepView(step, metrics, {rank: steps[-1] for rank, steps in self._latest.items()})

    def mean(self, name: str, ranks: Iterable[int]) -> dict[int, float]:
        """Return rank -> mean of a reading over the last LASTING steps with a new sample. Ranks with fewer are left out."""
        means = {}
        for rank in ranks:
            values = [step.values[name] for step in self._latest.get(rank, ()) if name in step.values]
            if len(values) == LASTING:
                means[rank] = statistics.fmean(values)
        return means

    def describe(self, rank: int) -> str:
        """Return `rank 3 (generate) on node1`."""
        component = next(name for name, ranks in self.components.items() if rank in ranks)
        return f"rank {rank} ({component}) on {self.nodes.get(rank, 'an unknown node')}"

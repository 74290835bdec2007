"""A rank's timeline: spans without gaps, merged and bounded, kept when the rank is killed; and idle shares."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.job.world import RankInfo, WorkerGroups, World
from pipeline.observe import rank_timeline
from pipeline.observe.rank_timeline import Timeline, Writer
from pipeline.observe.spans import WAITING, Merger, Span, category, span

ABOUT = {"rank": 0, "realm": "train", "engine": None, "node": "a"}
BEGAN = {"began": 1_700_000_000.0}
FIRST = {"name": "train rank 0 on a", **ABOUT, **BEGAN}


class Clock:
    """Stands in for a timeline's clocks."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_000_000.0 + self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rank_timeline, "time", made)
    return made


def flush(of: Timeline, folder: Path) -> list[dict]:
    """Return all events of the timeline's file, written once."""
    of.write(folder)
    of.close()
    return events(next(folder.glob("timeline/rank*.jsonl")))


def events(path: Path) -> list[dict]:
    """Return a file's events; the file is the trace event format's array without the closing bracket."""
    text = path.read_text()
    assert text.endswith(",\n")
    return json.loads(text[:-2] + "]")


def short(event: dict) -> list:
    """Return [begin, end, verb, phase] of a span, in seconds since the start in ABOUT or a Clock."""
    begin, (verb, _, phase) = event["ts"] / 1e6 % 100_000, event["name"].partition(": ")
    return [round(begin, 6), round(begin + event["dur"] / 1e6, 6), verb, phase]


# ---- recording --------------------------------------------------------------------------------------------------------------


def test_nested_phases_are_a_row_of_spans_without_gaps(clock, tmp_path):
    info = RankInfo(1, 3, 0, "node7", "here", tmp_path)
    world = World(info, WorkerGroups((0,), (1, 2), ((1, 2),)), None)
    clock.now += 1
    with world.phase("", verb="rollout"):
        clock.now += 2
        with world.phase("decode"):
            clock.now += 3
        clock.now += 4
        with world.phase("environment"):
            clock.now += 5
            lines = flush(world.timeline, tmp_path)  # in the middle of it

    about = {"rank": 1, "realm": "generate", "engine": 0, "node": "node7", "began": 1_000_100.0}
    where = {"pid": 1, "tid": 1}
    assert lines == [
        {"ph": "M", "name": "process_name", **where, "args": {"name": "generate rank 1 on node7", **about}},
        {"ph": "X", "name": "join", "cat": "other", **where, "ts": 1_000_100_000_000, "dur": 1_000_000},
        *(
            {"ph": "X", "name": name, "cat": of, **where, "ts": 1_000_000_000_000 + begin, "dur": dur}
            for begin, dur, of, name in (
                (101_000_000, 2_000_000, "rollout", "rollout"),
                (103_000_000, 3_000_000, "rollout", "rollout: decode"),
                (106_000_000, 4_000_000, "rollout", "rollout"),
                (110_000_000, 5_000_000, "environment", "rollout: environment"),
            )
        ),
    ]


@pytest.mark.parametrize(
    ("verb", "phase", "expected"),
    [
        ("idle", "", "wait"),
        ("rollout", "decode", "rollout"),
        ("rollout", "environment", "environment"),
        ("rollout", "wait for the leader", "wait"),
        ("receive", "round 1 of 2, from ranks 0, 1", "refit"),
        ("step", "step of the critic", "step"),
        ("score", "score", "forward"),
        ("setup", "load engine", "other"),
    ],
)
def test_categories(verb, phase, expected):
    assert category(verb, phase) == expected


# ---- merging ----------------------------------------------------------------------------------------------------------------


def merge(events: list[tuple], resolution: float = 0.01) -> list[Span]:
    merger = Merger(resolution)
    return [*itertools.chain(*(merger.take(Span.of(*event)) for event in events)), *merger.rest()]


def test_an_engine_that_steps_and_polls_its_mail_is_one_span():
    events = [(0.0, 5.0, "idle", "")]
    for _ in range(3000):  # a minute
        at = events[-1][1]
        events += [(at, at + 0.019, "rollout", "decode"), (at + 0.019, at + 0.02, "idle", "")]
    events.append((events[-1][1], events[-1][1] + 2, "receive", "receive"))
    waited, decoded, received = merge(events)
    assert (waited.name, decoded.name, received.name) == (("idle", ""), ("rollout", "decode"), ("receive", "receive"))
    assert decoded.count == 5999
    assert decoded.categories == pytest.approx({"rollout": 57.0, "wait": 2.999})


def test_steps_shorter_than_the_resolution_are_not_merged_into_the_span_before():
    events = [(0.0, 30.0, "idle", "")]
    for _ in range(4000):
        at = events[-1][1]
        events += [(at, at + 0.004, "rollout", "decode"), (at + 0.004, at + 0.005, "idle", "")]
    waited, decoded, *under_way = merge(events)
    assert waited.seconds == pytest.approx(30, abs=0.02)
    assert sum(each.seconds for each in under_way) < 0.01
    assert (decoded.name, decoded.category) == (("rollout", "decode"), "rollout")


def test_merging_keeps_every_second_and_its_category():
    draw = random.Random(0)
    for resolution in (0.001, 0.01, 0.3):
        at, events = 0.0, []
        for _ in range(2000):
            end = at + draw.choice([1e-4, 2e-3, 0.02, 0.5]) * draw.random()
            events.append((at, end, draw.choice(["idle", "rollout", "receive"]), draw.choice(["", "decode", "round 1"])))
            at = end
        found = merge(events, resolution)
        assert found[0].begin == 0 and found[-1].end == at
        assert all(before.end == after.begin for before, after in itertools.pairwise(found))
        assert sum(each.count for each in found) == len(events)
        assert all(each.seconds >= resolution for each in found[1:-1])
        spent, kept = {}, {}
        for begin, end, verb, phase in events:
            spent[category(verb, phase)] = spent.get(category(verb, phase), 0.0) + end - begin
        for each in found:
            again = span(json.loads(json.dumps(each.event(0, 0))))
            assert again.name == each.name and again.count == each.count
            for key, seconds in again.categories.items():
                kept[key] = kept.get(key, 0.0) + seconds
        assert kept == pytest.approx(spent, abs=1e-2)


def test_a_part_of_a_span_has_its_share():
    args = {"merged": 200, "seconds": {"rollout": 3.0, "wait": 1.0}}
    whole = span({"ph": "X", "name": "rollout: decode", "ts": 0, "dur": 4_000_000, "args": args}, shift_s=10.0)
    part = whole.part(11.0, 13.0)
    assert (part.begin, part.end, part.name, part.category) == (11.0, 13.0, ("rollout", "decode"), "rollout")
    assert part.categories == {"rollout": 1.5, "wait": 0.5}
    assert whole.part(14.0, 20.0) is None


# ---- the file ---------------------------------------------------------------------------------------------------------------


def write(path: Path, events: list, flushes: int) -> int:
    """Return the size of a file that was written that many times."""
    size = -(-len(events) // flushes)
    batches = iter([events[i : i + size] for i in range(0, len(events), size)])

    def take():
        batch = next(batches)
        return batch, batch[-1]

    writer = Writer(path, ABOUT | BEGAN, take)
    for _ in range(flushes):
        writer.flush()
    return path.stat().st_size


def test_a_files_growth_is_constant_per_doubling_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_timeline, "DOUBLING_BYTES", 8192)
    sizes = []
    for length in (4000, 8000, 16000, 32000):  # the worst case: no span is like the one before
        events = [(0.02 * i, 0.02 * (i + 1), f"verb {i % 7}", "") for i in range(length)]
        sizes.append(write(tmp_path / f"timeline/{length}", events, flushes=length // 100))
    unbounded = 32000 * 30
    growth = [after - before for before, after in itertools.pairwise(sizes)]
    assert all(0 < each <= 1.5 * 8192 for each in growth), growth
    assert sizes[-1] < unbounded / 10


def test_an_open_span_is_replaced_when_it_has_ended(tmp_path):
    takes = iter(
        [
            ([(0.0, 5.0, "setup", "load a model with a long name")], (5.0, 6.0, "idle", "wait for what other ranks see")),
            ([], (5.0, 7.0, "idle", "")),
            ([(5.0, 7.5, "idle", "")], (7.5, 8.0, "step", "")),
        ]
    )
    writer = Writer(tmp_path / "timeline/r", ABOUT | BEGAN, lambda: next(takes))
    expected = [[5.0, 6.0], [5.0, 7.0], [7.5, 8.0]]
    for times in expected:
        writer.flush()
        first, *spans = events(tmp_path / "timeline/r")
        assert first["args"] == FIRST and short(spans[0]) == [0.0, 5.0, "setup", "load a model with a long name"]
        assert short(spans[-1])[:2] == times
    assert [short(each)[0] for each in spans] == [0.0, 5.0, 7.5]


class Disk:
    """Counts calls to the file system."""

    def __init__(self, monkeypatch):
        self.asked = {"pwrite": 0, "ftruncate": 0}
        for name in self.asked:
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name, call):
        def counting(*arguments):
            self.asked[name] += 1
            return call(*arguments)

        return counting


def test_a_rank_with_nothing_new_does_not_write(clock, tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    ranks = Timeline(ABOUT, {"train": tuple(range(512))})
    writer = Writer(tmp_path / "timeline/r", ABOUT | BEGAN, ranks.take, ranks._quiet)
    for _ in range(33):
        writer.flush()
        clock.now += 1
    assert disk.asked == {"pwrite": 1 + 32 // 8, "ftruncate": 0}
    for verb in ("step", "idle"):
        ranks.enter(verb, "")
        writer.flush()
        clock.now += 1
    assert disk.asked["pwrite"] == 7
    assert [event["name"] for event in events(tmp_path / "timeline/r")[1:]] == ["join", "step", "idle"]


def test_the_file_is_truncated_only_where_it_was_longer(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    long, after = (1.0, 2.0, "setup", "load a model with a long name"), (1.0, 3.0, "step", "")
    takes = iter([([(0.0, 1.0, "join", "")], long), ([(1.0, 1.5, *long[2:])], (1.5, 2.5, *long[2:])), ([], after)])
    writer = Writer(tmp_path / "timeline/r", ABOUT | BEGAN, lambda: next(takes), quiet=0.0)
    cuts = []
    for _ in range(3):
        writer.flush()
        cuts.append(disk.asked["ftruncate"])
        first, *_, last = events(tmp_path / "timeline/r")
    assert first["args"] == FIRST and short(last) == [*after]
    assert cuts == [0, 0, 1]


RANK = """
import sys, time
from pathlib import Path
from pipeline.observe.rank_timeline import Timeline

timeline = Timeline({"rank": 3, "realm": "train", "engine": None, "node": "a"}, {"train": (3,)})
timeline.write(Path(sys.argv[1]))
timeline.enter("forward", "forward of the policy")
time.sleep(0.1)
timeline.enter("step", "step of the policy")
if sys.argv[2] == "close":
    timeline.close()
else:
    time.sleep(600)
"""


def test_a_killed_ranks_last_activity_is_in_its_file(tmp_path):
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), "sleep"])
    path = tmp_path / "timeline/rank00003.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not path.exists() or "step of the policy" not in path.read_text():
            assert time.monotonic() < deadline and rank.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
    about, *spans = events(path)
    assert about["args"]["rank"] == 3
    assert [each["name"] for each in spans][-2:] == ["forward: forward of the policy", "step: step of the policy"]


def test_a_rank_that_ends_writes_everything(tmp_path):
    subprocess.run([sys.executable, "-c", RANK, str(tmp_path), "close"], check=True, timeout=60)
    assert "step of the policy" in (tmp_path / "timeline/rank00003.jsonl").read_text()


def test_a_failing_disk_loses_only_the_file_and_is_reported_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(rank_timeline, "MOST_UNWRITTEN", 5)
    (tmp_path / "timeline").write_text("in the way")
    ended = iter([[(float(i), float(i + 1), f"verb {i}", "")] for i in range(20)])
    under_way = (99.0, 99.5, "idle", "")
    writer = Writer(tmp_path / "timeline/r", ABOUT | BEGAN, lambda: (next(ended), under_way))
    for _ in range(12):
        writer.flush()
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "timeline").unlink()
    writer.flush()
    assert "can be written again; 6 lines are lost" in caplog.text
    first, *spans = events(tmp_path / "timeline/r")
    assert first["args"] == FIRST and [each["name"] for each in spans] == [*(f"verb {i}" for i in range(6, 13)), "idle"]


# ---- idle shares ------------------------------------------------------------------------------------------------------------


def test_idle_shares_are_waiting_seconds_over_all_seconds(clock):
    workers = {"train": (0, 1), "generate": (2,), "reward": ()}
    ranks = [Timeline({**ABOUT, "rank": rank}, workers) for rank in range(3)]

    def step(*doing: str) -> None:
        """Add one second of it on each rank."""
        for rank, verb in zip(ranks, doing, strict=True):
            rank.enter(verb, "")
        clock.now += 1

    def told() -> None:
        for realm, rank in zip(("train", "generate"), ranks[1:], strict=True):
            ranks[0].add_account(realm, rank.account())

    step("idle", "idle", "setup")
    told()
    assert ranks[0].step_ended(0) == {}
    step("idle", "idle", "rollout")
    step("idle", "step", "rollout")
    step("step", "step", "idle")
    step("send", "send", "receive")
    told()
    assert ranks[0].step_ended(1) == pytest.approx({"idle/train": 3 / 8, "idle/generate": 1 / 4})
    step("step", "step", "rollout")
    step("step", "step", "idle")
    told()
    clock.now += 2  # rank 0 continues; what the others did since they replied is part of the next step
    assert ranks[0].step_ended(2) == pytest.approx({"idle/train": 0.0, "idle/generate": 1 / 2})
    told()
    assert ranks[0].step_ended(3) == pytest.approx({"idle/train": 0.0, "idle/generate": 1.0})


def test_the_file_and_the_shares_agree(clock, tmp_path):
    rank = Timeline(ABOUT, {"train": (0,)})
    draw = random.Random(1)
    for _ in range(500):
        rank.enter(*draw.choice([("idle", ""), ("rollout", "decode"), ("rollout", "environment"), ("step", "")]))
        clock.now += draw.random() * 0.02
    waited, lived = rank.account()
    _, *lines = flush(rank, tmp_path)
    spans = [span(event) for event in lines]
    assert sum(each.seconds for each in spans) == pytest.approx(lived, abs=1e-4)
    assert sum(each.categories.get(key, 0.0) for each in spans for key in WAITING) == pytest.approx(waited, abs=1e-3)

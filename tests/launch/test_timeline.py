"""Timelines of all ranks as one trace and as a picture."""

import gzip
import itertools
import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launch import report, timeline
from launch.drawing import merged_trace, rank_traces, step_picture
from launch.drawing.rank_traces import attempt_traces
from launch.runs.run_folder import RunFolder
from pipeline.observe.spans import CATEGORIES
from tests.launch import made_runs, written_traces
from tests.launch.written_traces import BEGAN, record
from tests.problems import refused

NEEDED = {"X": {"name", "pid", "tid", "ts", "dur"}, "M": {"name", "pid", "args"}, "C": {"name", "pid", "ts", "args"}}
NEEDED |= {"s": {"name", "cat", "id", "pid", "tid", "ts"}, "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"}}
"""The required fields of each kind of event in the trace event format."""


@pytest.fixture
def run(tmp_path) -> Path:
    """Write two train ranks and two engines of two ranks, three steps."""
    made = made_runs.folder(tmp_path / "run")
    written_traces.cluster(made_runs.attempt(made, "1", BEGAN), train=2, generate=4, steps=3, engine_ranks=2, per_node=2)
    lines = [
        {"step": step, "time": BEGAN + 10 * step + 1, "idle/train": 0.1 * step, "idle/generate": 0.5} for step in (1, 2, 3)
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return made


def traced(run: Path, *arguments: str) -> list[dict]:
    """Return the events; each has the fields of its kind, and no two slices of a thread overlap."""
    assert timeline.main([f"run={run}", *arguments]) == 0
    whole = json.loads((run / "timeline.json").read_text())
    assert set(whole) == {"displayTimeUnit", "traceEvents", "otherData"}
    events = whole["traceEvents"]
    for event in events:
        if "ts" in event:
            event["ts"] -= 1e6 * BEGAN
        assert set(event) >= NEEDED[event["ph"]] | {"ph"}, event
        assert all(isinstance(event[key], int | float) and event[key] >= 0 for key in ("ts", "dur") if key in event)
    for slices in by_thread(events).values():
        for before, after in itertools.pairwise(sorted(slices, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"]
    return events


def by_thread(events: list[dict]) -> dict[tuple[int, int], list[dict]]:
    found: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


def names(events: list[dict], what: str) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == what}


# ---- the trace --------------------------------------------------------------------------------------------------------------


def test_engines_and_nodes_are_processes_and_ranks_are_threads(run, capsys):
    events = traced(run)
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    ranks = {name: processes[pid, 0] for (pid, _), name in threads.items()}
    assert ranks == {
        "steps": "run",
        "rank 0": "train: node0",
        "rank 1": "train: node0",
        **dict.fromkeys(("rank 2", "rank 3"), "generate: engine 0 on node1"),
        **dict.fromkeys(("rank 4", "rank 5"), "generate: engine 1 on node2"),
    }
    slices = by_thread(events)
    assert set(slices) == set(threads)
    assert [event["name"] for event in slices[0, 0]] == ["step 1", "step 2", "step 3"]
    first = next(place for place, name in threads.items() if name == "rank 0")
    told = Counter(event["name"] for event in slices[first])
    assert (told["step: step of the policy"], told["send: round 1 of 1, to all"]) == (3, 3)
    assert told["idle"] == 4  # for rollouts, and at a step's end: but for the last one that goes on into the next step's
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert [shares["train"] for shares in counters] == pytest.approx([0.1, 0.2, 0.3])
    out = capsys.readouterr().out
    assert "events of 6 ranks" in out and "idle: generate" in out and "± 0.1 ms" in out


def test_arrows_lead_from_rank_0_to_the_first_rank_of_each_engine(run):
    events = traced(run)
    threads = names(events, "thread_name")
    ends = {event["id"]: threads[event["pid"], event["tid"]] for event in events if event["ph"] == "f"}
    begins = {event["id"]: threads[event["pid"], event["tid"]] for event in events if event["ph"] == "s"}
    assert set(begins) == set(ends)
    assert Counter(begins[id] + " to " + ends[id] for id in ends) == {"rank 0 to rank 2": 3, "rank 0 to rank 4": 3}
    for event in events:
        if event["ph"] in "sf":  # it is bound to the slice around it
            around = [
                s["name"] for s in by_thread(events)[event["pid"], event["tid"]] if 0 <= event["ts"] - s["ts"] <= s["dur"]
            ]
            assert any(name.startswith("send" if event["ph"] == "s" else "receive") for name in around)


def test_the_clocks_of_other_nodes_are_corrected(tmp_path, capsys):
    run = made_runs.folder(tmp_path / "run")
    attempt = made_runs.attempt(run, "1", BEGAN)
    record(attempt, 0, "train", [(0.0, 2.0, "step", ""), (2.0, 3.0, "send", "")], node="a")
    events = [(0.0, 2.0, "rollout", "decode"), (2.0, 3.0, "receive", "")]
    record(attempt, 1, "generate", events, engine=0, node="b", began=BEGAN + 7.5)
    clocks = {"a": {"clock_skew_s": 0.0, "clock_error_s": 0.0}, "b": {"clock_skew_s": 7.5, "clock_error_s": 0.003}}
    (attempt / "nodes.json").write_text(json.dumps({"nodes": clocks}))
    at = {event["name"]: event["ts"] for event in traced(run) if event["ph"] == "X"}
    assert at["send"] == at["receive"] == 2e6
    assert "corrected, to ± 3 ms when the attempt began" in capsys.readouterr().out
    clocks["b"] = {"clock_skew_s": None, "clock_error_s": None}
    (attempt / "nodes.json").write_text(json.dumps({"nodes": clocks}))
    at = {event["name"]: event["ts"] for event in traced(run) if event["ph"] == "X"}
    assert at["receive"] - at["send"] == 7.5e6
    assert "their offsets were not measured" in capsys.readouterr().out


def test_attempts_follow_each_other_and_a_killed_one_is_complete(run):
    second = made_runs.attempt(run, "2", BEGAN + 100)
    record(second, 0, "train", [(0.0, 1.0, "setup", "load"), (1.0, 2.0, "step", "")], began=BEGAN + 100)
    path = second / "timeline/rank00000.jsonl"
    path.write_text(path.read_text() + '{"ph":"X","na')  # the kill came while the line was written
    latest = [event for event in traced(run) if event["ph"] == "X"]
    assert {event["name"] for event in latest} == {"setup: load", "step"}
    both = [event for event in traced(run, "attempts=all", "step=2") if event["ph"] == "X"]
    assert sum(event["name"] == "receive: receive" for event in both) == 4 * 3
    assert max(event["ts"] for event in both) == pytest.approx(101e6)


def test_a_trace_of_some_steps_has_only_their_events(run):
    events = traced(run, "steps=2-3")
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0] == ["step 2", "step 3"]
    assert sum(event["name"] == "receive: receive" for event in events if event["ph"] == "X") == 4 * 2
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert min(times) == pytest.approx(11e6) and max(times) < 31e6


def test_a_compressed_trace_is_the_same(run, tmp_path):
    events = traced(run)
    assert timeline.main([str(run), "gz=true", f"out={tmp_path / 'small.json.gz'}"]) == 0
    with gzip.open(tmp_path / "small.json.gz") as file:
        assert len(json.load(file)["traceEvents"]) == len(events)
    assert (tmp_path / "small_step_3.svg").exists()


def test_a_window_of_a_long_file_is_found_without_reading_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_traces, "BLOCK", 256)
    attempt = made_runs.attempt(made_runs.folder(tmp_path / "run"), "1", BEGAN)
    events: list = [(0.0, 0.5, "setup", "")]
    for i in range(1, 2000):
        events.append((i - 0.5, i + 0.5, ("idle", "step")[i % 2], "x" * (i % 17)))
        if i % 10 == 0:
            events.append((i + 0.2, i // 10))  # within the span before, whose line comes later
    record(attempt, 0, "train", events)
    (rank,) = attempt_traces(RunFolder.at(tmp_path / "run").attempts)[0].ranks
    whole = list(rank.spans())
    for begin, end in ((0.0, 3.0), (700.25, 700.75), (1234.5, 1300.1), (1990.0, 5000.0)):
        found = list(rank.spans(BEGAN + begin, BEGAN + end))
        parts = [each.part(BEGAN + begin, BEGAN + end) for each in whole]
        assert [(each.begin, each.end, each.name) for each in found] == [(p.begin, p.end, p.name) for p in parts if p]
    assert rank.steps()[57] == pytest.approx((BEGAN + 560.2, BEGAN + 570.2))


def test_memory_does_not_grow_with_the_run(tmp_path):
    peaks = []
    for steps in (20, 200):
        run = made_runs.folder(tmp_path / str(steps))
        attempt = made_runs.attempt(run, "1", BEGAN)
        row = [(0.1 * i, 0.1 * (i + 1), ("idle", "rollout")[i % 2], "decode") for i in range(10 * steps)]
        record(attempt, 1, "generate", row, engine=0)
        recorded = attempt_traces(RunFolder.at(run).attempts)
        tracemalloc.start()
        merged_trace.write(tmp_path / f"{steps}.json", RunFolder.at(run), recorded)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / "200.json").stat().st_size > 8 * (tmp_path / "20.json").stat().st_size
    assert peaks[1] < 1.5 * peaks[0]


# ---- the picture ------------------------------------------------------------------------------------------------------------


RECT = re.compile(r'<rect x="[^"]*" y="[^"]*" height="([^"]*)" width="([^"]*)" class="is-([a-z]+)">')


def shares(svg: str) -> dict[str, float]:
    """Return category -> share of the area of all bars."""
    areas: Counter[str] = Counter()
    for height, width, key in RECT.findall(svg):
        areas[key] += float(height) * float(width)
    return {key: areas[key] / areas.total() for key in CATEGORIES}


@pytest.mark.parametrize(("train", "generate", "engine_ranks"), [(4, 4, 1), (256, 256, 4)])
def test_the_picture_shows_what_the_ranks_did(tmp_path, train, generate, engine_ranks):
    run = made_runs.folder(tmp_path / "run")
    attempt = made_runs.attempt(run, "1", BEGAN)
    written_traces.cluster(attempt, train, generate, 2, engine_ranks)
    step = attempt_traces(RunFolder.at(run).attempts)[0].step(2, 1600)
    svg = step_picture.svg_file(step, "a <title>")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    found = shares(svg)
    assert found["save"] == found["environment"] == 0  # nobody did that
    seconds: Counter[str] = Counter()
    for _, spans in step.rows:
        for each in spans:
            seconds.update(each.categories)
    for key in ("rollout", "forward", "step", "refit", "wait"):
        assert found[key] == pytest.approx(seconds[key] / seconds.total(), abs=0.01), key
    names = re.findall(r'text-anchor="end" class="tick">([^<]*)<', svg)
    assert names[0] == ("rank 0" if train == 4 else "node0") and len(names) == (8 if train == 4 else 32)
    idle = [rank_traces.idle_share(rows) for rows in step.realms().values()]
    assert all(0.1 < share < 0.8 for share in idle)


# ---- errors -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step=9"], "step 9 is not in the timeline of attempt 1, which has steps 1 to 3"),
        (["steps=2-9"], "step 9 is not in the timeline of attempt 1, which has steps 1 to 3"),
    ],
)
def test_bad_command_lines(run, capsys, arguments, said):
    assert timeline.main([f"run={run}", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_timeline_is_refused_with_a_reason(tmp_path, capsys):
    new = made_runs.folder(tmp_path / "new", "tiny_grpo")
    made_runs.attempt(new, "1", BEGAN)
    assert timeline.main([str(new)]) == 2
    assert "it has not started" in capsys.readouterr().err
    spoiled = made_runs.folder(tmp_path / "spoiled")
    folder = made_runs.attempt(spoiled, "1", BEGAN) / "timeline"
    folder.mkdir()
    (folder / "rank00000.jsonl").write_text('{"rank": 0}\n')  # of a version that wrote no trace events
    assert attempt_traces(RunFolder.at(spoiled).attempts) == []
    (folder / "rank00000.jsonl").write_text('[{"ph": "M"},\n')
    with refused(("run", "unreadable")):
        attempt_traces(RunFolder.at(spoiled).attempts)


# ---- the report's page ------------------------------------------------------------------------------------------------------


def test_the_report_draws_the_last_step_and_the_idle_shares(run, tmp_path):
    assert report.main([f"run={run}", f"out={tmp_path / 'r.html'}"]) == 0
    text = (tmp_path / "r.html").read_text()
    (drawn,) = [part.split("</svg>")[0] for part in text.split("<svg ")[1:]]
    assert drawn.count('text-anchor="end"') == drawn.count('class="is-refit"') == 6
    assert "engine 1, rank 5" in drawn and "2 ranks, idle " in drawn
    assert "step of the policy: " in drawn
    assert "idle share, train" in text and ">Timeline</h2>" in text

"""A run's texts are shown with control characters escaped, so that no terminal interprets them."""

import json
import re

import pytest
from rich.console import Console

from launch import status
from launch.executors.executor import JobStatus
from launch.runs.follow import Follower, MetricsTail
from launch.terminal.safe_text import on_one_line, plain
from tests.launch import made_runs
from tests.launch.runs.test_follow import RAISED, Job, fail, write_logs

TRICKS = {
    "the window's title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "the clipboard": ("\x1b]52;c;ZWNobyBoaQ==\x1b\\", r"\x1b]52;c;ZWNobyBoaQ==\x1b" + "\\"),
    "cleared screen": ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
    "one-character CSI": ("\x9b2J", r"\x9b2J"),
    "backspaces": ("no\x08\x08ok", r"no\x08\x08ok"),
    "reversed text": ("\u202egnp.exe", r"\u202egnp.exe"),
    "half a surrogate": ("\ud800", r"\ud800"),
    "no end": ("\x1b[", r"\x1b["),
    "colours": ("\x1b[1;32mINFO\x1b[0m", "INFO"),
    "blanks and joiners": ("12\u00a0%, 数学\u3000です 👩\u200d🔬", "12\u00a0%, 数学\u3000です 👩\u200d🔬"),
    "text": ("\tgrüße, 数学 🙂", "\tgrüße, 数学 🙂"),
}
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize(("said", "shown"), TRICKS.values(), ids=TRICKS)
def test_text_is_shown_and_control_characters_are_escaped(said, shown):
    assert plain(said) == shown
    assert on_one_line(f"{said}\n{said}") == f"{shown}\\n{shown}"


def everything() -> str:
    return " ".join(said for said, _ in TRICKS.values())


@pytest.mark.parametrize("where", ["message", "traceback", "log", "verdict", "host"])
def test_status_prints_no_control_characters(tmp_path, capsys, where):
    run = made_runs.folder(tmp_path / "runs/one")
    said = {"rank": 0, "message": "no", "traceback": ""}
    if where in ("message", "traceback", "host"):
        said |= {where: everything()}
    verdict = f"stop: {everything() if where == 'verdict' else 'crashed'}".encode(errors="replace").decode()
    log = f"Traceback (most recent call last):\n{everything()}\n".encode(errors="replace").decode() if where == "log" else ""
    made_runs.attempt(run, "1-0", made_runs.ago(50), verdict, None if where == "log" else said, log)
    for asked in (run, tmp_path / "runs"):
        status.main([str(asked)])
        told = capsys.readouterr().out
        assert not OBEYED.search(told)
        assert asked != run or r"\x1b]0;owned\x07" in told


def test_status_prints_one_line_for_a_folder_name_with_a_newline(tmp_path, capsys):
    made_runs.folder(tmp_path / "runs/one").rename(tmp_path / "runs/one\ndone  forged\x1b[2J")
    status.main([str(tmp_path / "runs")])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_follow_prints_no_control_characters(tmp_path, capsys):
    write_logs(tmp_path, "", everything().encode(errors="replace").decode())
    fail(tmp_path, "17-0", {**RAISED, "message": everything(), "traceback": ""})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0}) + "\n")
    waiting, failed = JobStatus("PENDING", everything()), JobStatus("FAILED", everything(), ended=True)
    assert not Follower(
        tmp_path, Job(waiting, failed), 3, MetricsTail(tmp_path), Console(highlight=False, soft_wrap=True)
    ).follow()
    told = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in told and not OBEYED.search(told)

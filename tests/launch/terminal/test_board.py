"""The board of a run on terminals of several heights, for which a console of rich stands."""

import io
import re

import pytest
from rich.console import Console

from launch.terminal.board import LEAST_IMPORTANT, Board

ROWS = [
    ("state", "running"),
    ("job", "local job 1"),
    ("start-up", "joining the world 1 s, " * 12),
    ("  train", "RUNNING  vm"),
    ("  generate", "RUNNING  vm"),
    ("step", "7 of 40"),
    ("train/reward", "0.5"),
    ("phases", "rollout 1 s (50%), train 1 s (50%)"),
    ("warnings", "step 1: rank 0 waits"),
    *(("", f"step {step}: rank {step} waits") for step in range(2, 9)),
    ("changes", "after step 3: grpo.val_period 10 -> 5"),
    ("", "after step 4: grpo.val_period 5 -> 10"),
    ("logs", "/runs/x/attempts/1"),
]
RANKS = [[str(rank), "1.5"] for rank in range(8)]


def drawn(height: int, whole: bool = False, rows=ROWS, table=RANKS) -> list[str]:
    """Return the lines of the last frame on a terminal of 80 columns."""
    terminal = io.StringIO()
    board = Board(Console(file=terminal, force_terminal=True, width=80, height=height))
    with board:
        board.print_rows(rows, heading="tiny (grpo) in /runs/x")
        board.print_table(["rank", "CPU"], table)
        board.draw("every 2 s", whole)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    last = shown[shown.rindex("tiny (grpo)" if rows else " rank") :]  # drawn again at the end
    return [line.rstrip() for line in last.rstrip().splitlines()]


def test_a_high_terminal_shows_everything():
    lines = drawn(60)
    assert all(any(line.startswith(label) for line in lines) for label, _ in ROWS if label) and lines[-1] == "every 2 s"
    assert [line.split()[0] for line in lines[-9:-1]] == list("01234567")
    assert lines == drawn(len(lines)), "what just fits is whole"


@pytest.mark.parametrize("height", (8, 11, 14, 19, 24, 30, 34))
def test_a_low_terminal_has_the_state_the_step_and_what_is_missing(height):
    lines = drawn(height)
    assert len(lines) <= height and "..." not in lines, lines
    assert lines[1].split() == ["state", "running"] and any(line.startswith("step ") for line in lines)
    told = " ".join(lines[lines.index(next(line for line in lines if line.startswith("every 2 s"))) :])
    gone = {label for label, _ in ROWS if label in LEAST_IMPORTANT and not any(line.startswith(label) for line in lines)}
    assert gone and told.startswith(f"every 2 s; no room for {', '.join(label for label in LEAST_IMPORTANT if label in gone)}")
    assert ("start-up" in gone) != any("RUNNING" in line for line in lines), "components go with the start"
    ranks = sum(bool(re.fullmatch(r" \d +1\.5", line)) for line in lines)
    warnings = [line for line in lines if "waits" in line]
    assert (f"{8 - ranks} of 8 lines of the table" in told) == (ranks < 8)
    assert (f"{8 - len(warnings)} of 8 warnings" in told) == (len(warnings) < 8)
    assert "step 8: rank 8 waits" in warnings[-1] and warnings[0].startswith("warnings"), "the latest ones"


def test_the_last_frame_is_whole():
    assert drawn(10, whole=True) == drawn(60)


def test_a_long_list_of_runs_is_cut_to_the_newest():
    lines = drawn(10, rows=[], table=[["running", f"run{number}"] for number in range(40)])
    assert len(lines) <= 10 and "run0" in lines[2] and re.search(r"; no room for 3\d of 40 lines of the table$", lines[-1])

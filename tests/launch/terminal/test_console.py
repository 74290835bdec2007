"""Output of commands on a terminal, and elsewhere."""

import contextlib
import io
import re
from collections.abc import Callable

import pytest

from launch import status
from launch.submit import SubmitRequest
from launch.terminal import command_line, console
from pipeline.config import Problem, RecipeError
from pipeline.recipe.problems import help_hint
from tests.launch import made_runs

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
PROBLEMS = [
    Problem("grpo.seed", "wrong-type", "got 'x'; expected a whole number", "recipes/tiny_grpo.yaml:12"),
    Problem("cluster.train.nodes", "too-large", f"got 9; expected at most 4. {' '.join(['Try fewer.'] * 12)}"),
]


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Return a function that calls another one on a terminal of 60 columns, and returns its output."""
    for name, value in {"COLUMNS": "60", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(function: Callable[..., object], *arguments: object) -> str:
        stream = Terminal()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            function(*arguments)
        return stream.getvalue()

    return call


def run(problems: list[Problem]) -> int:
    def command(_: SubmitRequest) -> int:
        raise RecipeError(*problems)

    return command_line.run("Do.", SubmitRequest, command, ["recipe=x"])


def test_problems_on_a_terminal_are_a_wrapped_list(on_terminal):
    shown = on_terminal(run, PROBLEMS)
    lines = ESCAPE.sub("", shown).splitlines()
    assert lines[0] == "error: 2 problems" and "\x1b[" in shown
    assert max(map(len, lines[:-1])) <= 60 and lines[-1].endswith("help=wrong-type,too-large")  # whole, to be copied
    starts = [number for number, line in enumerate(lines) if line.startswith("  • ")]
    assert len(starts) == 2 and lines[-1].startswith("for cause and cure")
    assert all(line.startswith("    ") for number, line in enumerate(lines[1:-1], 1) if number not in starts)
    text = " ".join(" ".join(lines).split())
    assert "recipes/tiny_grpo.yaml:12: grpo.seed: got 'x'; expected a whole number [wrong-type]" in text
    assert "[too-large]" in text


def test_problems_elsewhere_are_plain_lines(capsys):
    assert run(PROBLEMS) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "error: 2 problems",
        "  - recipes/tiny_grpo.yaml:12: grpo.seed: got 'x'; expected a whole number [wrong-type]",
    ]
    assert len(lines) == 4 and lines[3].startswith("for cause and cure")


def test_no_color_leaves_no_escape_codes(on_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = on_terminal(run, PROBLEMS) + on_terminal(console.print_field, "note", "a " * 60, "# a", "green")
    assert "\x1b" not in shown and "  • " in shown


def test_a_field_wraps_behind_its_label(on_terminal):
    first, *rest = ESCAPE.sub("", on_terminal(console.print_field, "note", "word " * 20, "# plain")).splitlines()
    assert first.startswith("note       word") and rest and all(line.startswith(" " * 11 + "word") for line in rest)


def test_usage_wraps_on_a_terminal(on_terminal):
    shown = on_terminal(command_line.run, "Do.\n\nMore.\n", SubmitRequest, lambda _: 0, ["help"])
    lines = ESCAPE.sub("", shown).splitlines()
    assert max(map(len, lines)) <= 60 and lines[0] == "Do." and lines[-1] == "More."


def test_status_wraps_on_a_terminal(on_terminal, tmp_path):
    for name in ("one", "two"):
        made_runs.attempt(made_runs.folder(tmp_path / f"runs/{name}"), "1-0", made_runs.ago(50), f"stop: {'crashed ' * 20}")
    shown = ESCAPE.sub("", on_terminal(status.main, [str(tmp_path / "runs/one")]))
    assert "failed" in shown and all(len(line) <= 60 for line in shown.splitlines() if "/" not in line)  # paths stay whole
    header, *runs = ESCAPE.sub("", on_terminal(status.main, [str(tmp_path / "runs")])).splitlines()
    assert header.startswith("state ") and sorted(run.split()[-1] for run in runs) == [
        str(tmp_path / "runs/one"),
        str(tmp_path / "runs/two"),
    ]


def test_a_path_is_whole_on_a_terminal(on_terminal):
    folder = f"/lustre/{'projects/' * 10}run"
    assert folder in ESCAPE.sub("", on_terminal(console.print_rows, [("logs", f"the end of {folder}")]))
    table = ESCAPE.sub("", on_terminal(console.print_table, ("state", "folder"), [("done", folder), ("running", "runs/[b]x")]))
    assert table.splitlines() == ["state    folder", f"done     {folder}", "running  runs/[b]x"]


def test_markup_and_escapes_in_a_message_are_text(on_terminal):
    shown = on_terminal(run, [Problem("a", "unknown-key", "got [red]x[/red] :smile: \x1b[2J")])
    text = " ".join(ESCAPE.sub("", shown).split())
    assert text == rf"error: a: got [red]x[/red] :smile: \x1b[2J [unknown-key] {help_hint([Problem('a', 'unknown-key', '')])}"


def test_one_problem_on_a_terminal_has_the_line_about_help(on_terminal):
    lines = ESCAPE.sub("", on_terminal(run, PROBLEMS[:1])).splitlines()
    assert lines[0].startswith("error:") and lines[-1].startswith("for cause and cure")

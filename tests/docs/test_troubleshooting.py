"""The table of problem codes has exactly the codes that are used, and launch/TROUBLESHOOTING.md is written from it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import submit
from launch.executors.executor import ROOT
from launch.terminal import troubleshooting
from pipeline.recipe.problem_codes import CODES, GROUPS
from pipeline.recipe.problems import Problem

POSITION = {"Problem": 1, "problem": 1, "_problem": 1, "Check": 1, "_refusal": 0}
"""The functions that make problems, and the position of their code argument."""
SOURCES = sorted(path for part in ("pipeline", "launch", "containers") for path in (ROOT / part).rglob("*.py"))


def codes(path: Path) -> Iterator[str]:
    """Yield the codes that a file's calls give as texts, and those in branches of a conditional expression."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if (position := POSITION.get(name)) is not None and len(node.args) > position:
                code = node.args[position]
                for branch in (code.body, code.orelse) if isinstance(code, ast.IfExp) else (code,):
                    if isinstance(branch, ast.Constant) and re.fullmatch("[a-z]+(-[a-z]+)*", str(branch.value)):
                        yield branch.value


def test_every_code_that_is_used_is_in_the_table():
    used = {(code, path.name) for path in SOURCES for code in codes(path)}
    assert len({code for code, _ in used}) > 30  # the calls were found
    assert {(code, name) for code, name in used if code not in CODES} == set()


def test_a_problem_has_a_code_of_the_table():
    with pytest.raises(AssertionError, match=r"of-no-table: add it to pipeline/recipe/problem_codes\.py"):
        Problem("key", "of-no-table", "message")


def test_every_code_of_the_table_is_used():
    texts = {
        node.value
        for path in SOURCES
        if path.name != "problem_codes.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(CODES) - texts == set()
    assert len(CODES) == sum(map(len, GROUPS.values()))


def test_the_page_is_what_the_generator_writes():
    assert troubleshooting.PAGE.read_text() == troubleshooting.markdown(), "run: python -m launch.terminal.troubleshooting"


def test_a_cause_and_a_cure_are_sentences():
    for name, (cause, cure) in CODES.items():
        assert cause.endswith(".") and cure.endswith("."), name


def test_help_prints_cause_and_cure(capsys):
    assert submit.main(["help=not-divisible"]) == 0
    assert CODES["not-divisible"].cause in (printed := capsys.readouterr().out) and CODES["not-divisible"].cure in printed


def test_the_line_below_several_problems_names_codes_that_help_explains(capsys):
    assert submit.main(["recipe=tiny_grpo", "grpo.sed=1", "policy.precision=int4", "grpo.sed2=1"]) == 2
    *_, command = capsys.readouterr().err.splitlines()
    assert command.endswith("submit.py help=unknown-key,not-a-choice")
    assert submit.main(command.partition("submit.py ")[2].split()) == 0
    printed = capsys.readouterr().out
    assert all(CODES[code].cause in printed and CODES[code].cure in printed for code in ("unknown-key", "not-a-choice"))

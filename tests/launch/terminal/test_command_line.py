"""Command lines, of a command made here and of every command: parsing, errors, exit statuses."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import pytest

from launch.terminal import command_line
from launch.terminal.command_line import Key, parse
from pipeline.config import Problem, RecipeError
from tests.problems import refused

COMMANDS = ("submit", "sweep", "status", "export", "report", "timeline", "plan_refit")


@dataclass(frozen=True)
class Made:
    folder: Annotated[list[Path], Key("DIR", "folders", bare=True)]
    step: Annotated[int | None, Key("N", "a step")] = None
    every: Annotated[float, Key("SECONDS", "how often")] = 1.0
    kind: Annotated[Literal["big", "small"], Key("KIND", "which")] = "big"
    loud: Annotated[bool, Key("true", "with noise")] = False
    pair: Annotated[list[str] | None, Key("A-B", "two", read=lambda text: text.split("-"))] = None

    def problems(self) -> Iterator[Problem]:
        if self.loud and self.kind == "small":
            yield Problem("loud", "contradiction", "small ones are quiet")


@dataclass(frozen=True)
class WithOthers:
    recipe: Annotated[str, Key("NAME", "which")]
    others: Annotated[list[str], Key("key=value", "the rest", others=True)] = field(default_factory=list)


def test_values_have_the_types_of_their_fields(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    asked = parse(Made, ["one", "a=b", "folder=two", "step=3", "every=0.5", "kind=small", "loud=False", "pair=x-y"])
    assert asked == Made([tmp_path / "one", tmp_path / "a=b", tmp_path / "two"], 3, 0.5, "small", False, ["x", "y"])
    assert parse(Made, ["one"]) == Made([tmp_path / "one"])
    assert parse(Made, ["one", "step=1", "step=2"]) == Made([tmp_path / "one"], 2)  # the last counts, as with the recipe's keys
    assert parse(WithOthers, ["a.b=1", "recipe=x", "step==2"]) == WithOthers("x", ["a.b=1", "step==2"])


@pytest.mark.parametrize(
    ("arguments", "key", "code"),
    [
        ([], "folder", "missing-value"),
        (["one", "stepp=3"], "stepp", "unknown-key"),
        (["one", "step=-1"], "step", "wrong-type"),
        (["one", f"step={'9' * 5000}"], "step", "wrong-type"),
        (["one", "step="], "step", "missing-value"),
        (["one", "every=0"], "every", "wrong-type"),
        (["one", "every=nan"], "every", "wrong-type"),
        (["one", "kind=huge"], "kind", "not-a-choice"),
        (["one", "loud=maybe"], "loud", "wrong-type"),
        (["one", "loud=true", "kind=small"], "loud", "contradiction"),
        (["x" * 5000], "folder", "unreadable"),
        (["one", "--loud"], "--loud", "bad-format"),
        (["one", "a\udc80b"], r"'a\udc80b'", "bad-format"),
    ],
)
def test_an_invalid_command_line_is_refused(arguments, key, code):
    with refused((key, code)):
        parse(Made, arguments)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["tiny_grpo"], "recipe=tiny_grpo"),
        (["mine.yaml"], "recipe=mine.yaml"),
        (["grpo.seed"], "grpo.seed=VALUE"),
        (["--config", "a.yaml"], "recipe=a.yaml"),
        (["--grpo.max-num-steps", "3"], "grpo.max_num_steps=3"),
        (["--dry-run", "recipe=a"], "dry_run=true"),
        (["--dry-run", "--show"], "dry_run=true"),
        (["+data.path=x"], "data.path=x"),
        (["~env.math"], "env.math=null"),
    ],
)
def test_options_of_other_commands_suggest_the_key(arguments, meant):
    with pytest.raises(RecipeError) as error:
        parse(WithOthers, ["recipe=x", *arguments])
    assert error.value.problems[0].message.endswith(f"try {meant}")


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (RecipeError(Problem("a.b", "too-small", "got 0\x1b[2J")), 2, "error: a.b: got 0\\x1b[2J [too-small]\n"),
        (FileNotFoundError(2, "No such file", "there"), 2, "error: there: No such file\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_statuses(capsys, raised, status, said):
    def command(_: WithOthers) -> int:
        raise raised

    assert command_line.run("Do.", WithOthers, command, ["recipe=x"]) == status
    assert capsys.readouterr().err == said


def test_an_os_error_without_a_file_is_not_a_user_error():
    def command(_: WithOthers) -> int:
        raise OSError("?")

    with pytest.raises(OSError):
        command_line.run("Do.", WithOthers, command, ["recipe=x"])


def test_usage(capsys):
    for arguments, status in (([], 2), (["help"], 0)):
        assert command_line.run("Do.\n\nMore.\n", WithOthers, lambda _: 0, arguments) == status
        assert capsys.readouterr().out == "Do.\n\n    recipe=NAME  which\n    key=value    the rest\n\nMore.\n"


def request_class(command) -> type:
    """Return the class of a command's keys."""
    return get_type_hints(command.execute)["request"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_its_keys(name, capsys):
    module = importlib.import_module(f"launch.{name}")
    assert module.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert f"python launch/{name}.py" in told
    assert all(f"    {key}=" in told for key in request_class(module).__annotations__ if key != "overrides")


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (["tiny_grpo"], ["tiny_grpo: is not key=value; try recipe=tiny_grpo"]),
        (["recipe", "=", "tiny"], ["recipe: got 'recipe = tiny'; expected recipe=tiny, without spaces around `=`"]),
        (
            ["recipe=a", "grpo.seed", "=", "3", "x.y", "=4", "a.b=", "c"],
            [
                "grpo.seed: got 'grpo.seed = 3'; expected grpo.seed=3, without spaces around `=`",
                "x.y: got 'x.y =4'; expected x.y=4, without spaces around `=`",
                "a.b: got 'a.b= c'; expected a.b=c, without spaces around `=`",
            ],
        ),
        (
            ["recipe=a", "grpo.seed", "3", "x.y", "-1", "z.w"],
            [
                "grpo.seed: got 'grpo.seed 3'; expected grpo.seed=3",
                "x.y: got 'x.y -1'; expected x.y=-1",
                "z.w: is not key=value; try z.w=VALUE",
            ],
        ),
        (
            ["recipe", "tiny"],
            ["recipe: is not key=value; try recipe=NAME", "tiny: is not key=value; try recipe=tiny"],
        ),
    ],
)
def test_each_mistake_is_one_problem(arguments, problems):
    with pytest.raises(RecipeError) as caught:
        parse(WithOthers, arguments)
    assert [f"{problem.key}: {problem.message}" for problem in caught.value.problems] == problems


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("submit", ["grpo.seed=1"], ("recipe", "missing-value")),
        ("submit", ["recipe=a", "show=true", "plan=true"], ("plan", "contradiction")),
        ("submit", ["follow=a", "recipe=b"], ("follow", "contradiction")),
        ("submit", ["follow=a", "grpo.seed=1"], ("follow", "contradiction")),
        ("submit", ["recipe=a", f"plan_from={'x' * 5000}"], ("plan_from", "unreadable")),
        ("sweep", ["seeds=[1]"], ("sweep", "missing-value")),
        ("sweep", ["check=b", "sweep=a"], ("check", "contradiction")),
        ("sweep", ["check=b", "wait=true"], ("check", "contradiction")),
        ("sweep", ["check=b", "seeds=[1]"], ("check", "contradiction")),
        ("sweep", ["sweep=a", "id=../x"], ("id", "bad-format")),
        ("timeline", ["a", "steps=3-2"], ("steps", "wrong-type")),
        ("timeline", ["a", "steps=1-2", "attempts=all"], ("steps", "contradiction")),
        ("plan_refit", ["recipe=a", "model_config=nowhere/config.json"], ("model_config", "file-not-found")),
    ],
)
def test_keys_that_exclude_each_other_are_refused(name, arguments, problem):
    with refused(problem):
        parse(request_class(importlib.import_module(f"launch.{name}")), arguments)

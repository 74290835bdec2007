"""A file of no known format is refused, and options pass only to the reader of a foreign recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import submit
from launch.recipes import foreign, reading
from launch.terminal import command_line
from pipeline.config import RecipeError
from pipeline.seams.extras import EXTRAS
from tests.problems import refused

THEIRS = Path(__file__).parents[2] / "nemo_rl/recipes/grpo.yaml"


@pytest.mark.parametrize(("name", "text"), [("run.sh", "echo hello\n"), ("rl.toml", "[a]\nb = 1\n"), ("a.py", "x = 1\n")])
def test_a_file_that_no_reader_recognizes_names_the_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with refused(("recipe", "bad-format")) as error:
        reading.inspect(str(tmp_path / name))
    assert all(form.description in str(error.value) for form in foreign.FORMATS) and name in str(error.value)


def test_each_format_has_its_extra() -> None:
    assert {form.extra for form in foreign.FORMATS} <= EXTRAS.keys()


def test_options_of_a_foreign_recipe_are_overrides_in_order() -> None:
    options = ["--rate", "1e-6", "--flag", "+a.b=1", "~c", "name", "x=y"]
    request = command_line.parse(submit.SubmitRequest, ["plan=true", f"recipe={THEIRS}", *options])
    assert request.overrides == options and request.plan


def test_a_flag_is_no_option_of_our_own_recipe() -> None:
    with pytest.raises(RecipeError) as error:
        command_line.parse(submit.SubmitRequest, ["recipe=tiny_sft", "--bf16", "+a=1"])
    assert [problem.code for problem in error.value.problems] == ["bad-format", "bad-format"]
    assert "is not key=value; try bf16=true" in str(error.value)

"""Names that become folders stay in their parent folder."""

from pathlib import Path

import pytest

from launch import sweep
from launch.sweeps import suite
from launch.terminal import command_line
from pipeline import config
from pipeline.config import yaml_text
from tests.launch.model import write_recipe
from tests.problems import refused

CLIMBING = ("..", "../a", "a/../../b", "/tmp/a", ".", ".a", "a\n", "a\n/../b")


@pytest.mark.parametrize("name", CLIMBING)
def test_a_sweeps_names_stay_in_its_folder(tmp_path, name):
    with refused(("id", "bad-format")):
        command_line.parse(sweep.SweepRequest, ["sweep=one", f"id={name}"])
    gates = {"learns": {"value": "last(val/loss)", "at_most": 1}}
    for given in ({"name": name, "runs": {"tiny_sft": {}}}, {"name": "one", "runs": {name: {"recipe": "tiny_sft"}}}):
        path = tmp_path / "suite.yaml"
        path.write_text(yaml_text.dump({"seeds": [1], "gates": gates, **given}))
        with refused(("name" if given["name"] == name else f"runs.{name}", "bad-format")):
            suite.load(str(path), [])


@pytest.mark.parametrize("name", ["../../a", "/tmp/a", ".."])
def test_a_recipes_name_does_not_choose_its_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path / "recipes")
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("run_dir"))
    path.write_text(text)
    assert config.load(str(path), [f"name={name}"]).run_dir == str(tmp_path / "runs" / path.stem)


@pytest.mark.parametrize("name", ["...yaml", "..yaml"])
def test_a_recipes_file_does_not_make_another_folder_its_run_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path / "recipes")
    path.rename(path.with_name(name))
    with refused(("recipe", "bad-format")):
        config.load(str(Path("recipes") / name))

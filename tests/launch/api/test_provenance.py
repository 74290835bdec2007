"""Lineage and the registry of models from Python: the same as the commands print."""

import json
import os
from dataclasses import asdict

import hetstep
import pytest

from launch import lineage, registry
from tests.launch.api import program
from tests.launch.governance.test_lineage import everything, labels, runs  # noqa: F401 fixture
from tests.problems import refused


def test_lineage_is_what_the_command_prints(runs, tmp_path, capsys):  # noqa: F811
    found = hetstep.lineage(runs / "grpo", root=runs)
    assert labels(found.nodes) == ["run grpo"]
    above = {"checkpoint sft, step 10", "data prompts.jsonl", "run sft", "data sums.jsonl", "model base"}
    assert above <= set(labels(found.ancestors)) and "run grpo" not in labels(found.ancestors)
    assert labels(found.descendants) == everything(runs)[3:]
    assert lineage.main([str(runs / "grpo"), f"root={runs}"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(found)
    assert ">sft, step 10<" in found.draw(tmp_path / "picture.svg").read_text()
    made = hetstep.made_from(tmp_path / "sums.jsonl", root=runs)
    assert labels(each.node for each in made.descendants) == everything(runs) and made.unhashed == 0
    assert lineage.main([f"made_from={tmp_path}/sums.jsonl", f"root={runs}"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(made)
    (tmp_path / "unknown.txt").write_text("of no run")
    with refused(("path", "file-not-found")):
        hetstep.lineage(tmp_path / "unknown.txt", root=runs)
    with refused(("made_from", "file-not-found")):
        hetstep.made_from(tmp_path / "nothing", root=runs)


def test_a_registry_is_that_of_the_command(runs, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    models = hetstep.registry()
    assert models.names() == models.versions() == []
    added = models.add("adder", "grpo_model")
    assert (added.version, added.stage, added.export) == (1, "candidate", str(tmp_path / "grpo_model"))
    assert [(each["task"], each["value"]) for each in added.scores] == [("addition", 0.75)]
    assert models.promote("adder", 1, "production").stage == "production"
    assert models.show("adder") == models.show("adder", 1) == models.versions("adder")[0] == models.versions()[0]
    assert registry.main(["list", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out) == [asdict(version) for version in models.versions()]
    assert registry.main(["show", "name=adder"]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(models.show("adder"))
    with refused(("name", "file-not-found")):
        models.show("other")


def test_a_folder_of_the_audit_log_may_be_relative(runs, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    added = hetstep.registry(tmp_path / "models", audit="log").add("adder", "grpo_model")
    assert added.history[0]["audit"]["folder"] == str(tmp_path / "log") and os.path.exists("log/audit.jsonl")


def test_a_program_without_torch_reads_lineage(tmp_path):
    done = program.run(
        """
import hetstep
try:
    hetstep.lineage("nothing")
except hetstep.RecipeError as error:
    assert error.codes == ("file-not-found",)
assert hetstep.registry().versions() == []
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_a_stage_that_there_is_not_is_refused(runs, tmp_path):  # noqa: F811
    models = hetstep.registry(runs / "registry")
    models.add("adder", tmp_path / "grpo_model", root=runs)
    with pytest.raises(hetstep.RecipeError) as error:
        models.promote("adder", 1, "best")  # pyright: ignore[reportArgumentType]
    assert error.value.codes == ("not-a-choice",)
    assert models.show("adder").stage == "candidate"

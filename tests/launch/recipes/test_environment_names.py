"""Values of the environment stay in the run folder; what leaves it has the names of their variables."""

import pytest
import yaml

from launch import bundle
from launch.pages import report_page
from launch.recipes import reading
from launch.runs import run_setup
from launch.runs.run_folder import RunFolder
from launch.submission.prepare import examine
from pipeline import config
from pipeline.config import environment_names
from pipeline.tracking.attachments import attachments
from tests.problems import named

VALUE = "/private/of-the-shell/rows.jsonl"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the folder of a run whose recipe takes values from the environment, and its recipe."""
    monkeypatch.setenv("HETSTEP_TEST_ROWS", VALUE)
    monkeypatch.setenv("HETSTEP_TEST_PARTITION", "secretive-queue")
    monkeypatch.setenv("HETSTEP_TEST_STEPS", "7")
    given = [
        "data.train.data_path=${oc.env:HETSTEP_TEST_ROWS}",
        "data.validation.data_path=${data.train.data_path}",
        "cluster.train.partition=${oc.env:HETSTEP_TEST_PARTITION}",
        "sft.max_num_steps=${oc.decode:${oc.env:HETSTEP_TEST_STEPS}}",
        f"run_dir={tmp_path / 'run'}",
    ]
    loaded = config.inspect("tiny_sft", given)
    (tmp_path / "run/attempts/1").mkdir(parents=True)
    run_setup.prepare(loaded.recipe, tmp_path / "run", "#!/bin/bash\n", loaded.from_environment)
    (tmp_path / "run/attempts/1/rank00000.log").write_text(f"cannot read {VALUE}\n")
    return tmp_path / "run", loaded.recipe


def test_a_bundle_a_report_and_trackers_get_names(run):
    folder, _ = run
    texts = dict(bundle.contents(RunFolder.at(folder)))
    assert environment_names.FILE not in texts and "rank00000.log" in str(texts.keys())
    texts["report"] = str(report_page.recipes([RunFolder.at(folder)], ["run"]))
    (sent,) = [each for each in attachments(folder, 1, 0) if each.name == "recipe.yaml"]
    sent.send(type("Tracker", (), {"log_file": lambda self, path: texts.update(tracker=path.read_text())})())
    for name, text in texts.items():
        assert "of-the-shell" not in text and "secretive-queue" not in text, name
    for name in ("recipe.yaml", "report", "tracker"):
        assert "${oc.env:HETSTEP_TEST_ROWS}" in texts[name] and "${data.train.data_path}" in texts[name]
    assert "${oc.env:HETSTEP_TEST_ROWS}" in texts["attempts/1/rank00000.log"]
    assert yaml.safe_load(texts["recipe.yaml"])["sft"]["max_num_steps"].startswith("${oc.decode")


def test_the_run_itself_goes_on_without_the_variables(run, monkeypatch):
    folder, recipe = run
    for name in ("HETSTEP_TEST_ROWS", "HETSTEP_TEST_PARTITION", "HETSTEP_TEST_STEPS"):
        monkeypatch.delenv(name)
    assert config.read(folder / "recipe.yaml") == recipe
    assert recipe.data.train.data_path == VALUE and recipe.sft.max_num_steps == 7
    run_setup.prepare(recipe, folder, "#!/bin/bash\n")  # a submission that takes nothing from the environment
    assert not (folder / environment_names.FILE).exists()
    assert environment_names.masked(folder, VALUE) == VALUE


def test_a_submission_hands_the_names_on(monkeypatch):
    monkeypatch.setenv("HETSTEP_TEST_PARTITION", "secretive-queue")
    given = ["cluster.train.partition=${oc.env:HETSTEP_TEST_PARTITION}", "cluster.executor=local"]
    (prepared,) = examine("tiny_sft", given, dry=True).prepared
    assert prepared.from_environment == {"cluster.train.partition": "${oc.env:HETSTEP_TEST_PARTITION}"}


def test_a_damaged_file_of_names_is_named(run):
    folder, _ = run
    (folder / environment_names.FILE).write_text("[]")
    with pytest.raises(config.RecipeError, match=environment_names.FILE):
        environment_names.recipe_text(folder)


def test_a_recipe_of_nemo_rl(tmp_path, monkeypatch):
    monkeypatch.setenv("HETSTEP_TEST_MODEL", "/private/of-the-shell/model")
    (tmp_path / "theirs.yaml").write_text(
        "grpo: {num_prompts_per_step: 2}\npolicy: {model_name: '${oc.env:HETSTEP_TEST_MODEL}'}\ncluster: {num_nodes: 1}\n"
    )
    loaded = reading.inspect(str(tmp_path / "theirs.yaml"))
    assert loaded.recipe.policy.model_name == "/private/of-the-shell/model"
    assert loaded.from_environment["policy.model_name"] == "${oc.env:HETSTEP_TEST_MODEL}"


def test_a_run_folder_cannot_read_the_environment_of_who_looks_at_it(run, monkeypatch):
    folder, _ = run
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("secretive-queue", "${oc.env:HETSTEP_TEST_STEPS}"))
    with pytest.raises(config.RecipeError) as error:
        config.read(folder / "recipe.yaml")
    assert named(error.value.problems) == {("cluster.train.partition", "bad-interpolation")}

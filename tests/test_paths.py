"""Names and relative paths in a recipe are relative to its file; runs/ is in the working directory."""

import textwrap

import pytest

from launch.submission.prepare import run_order
from pipeline import config

ROOT = config.RECIPES.parent
BASE = """\
algorithm: grpo
policy: {model_name: model}
env: {e: {kind: math}}
data: {train: {env_name: e, data_path: rows.jsonl, prompt_file: ../prompt.txt}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into a folder other than the working directory."""
    (tmp_path / "there/model").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def to(name, text=BASE):
        (tmp_path / "there" / name).write_text(textwrap.dedent(text))
        return str(tmp_path / "there" / name)

    return to


def load(path, *overrides):
    loaded = config.inspect(path, list(overrides))
    assert loaded.problems == []
    return loaded.recipe


def test_paths_are_relative_to_the_recipes_file(write, tmp_path):
    more = "value: {model_name: Qwen/Qwen3-8B}\nteacher: {model_name: '${policy.model_name}'}\n"
    mounts = "cluster: {train: {container_image: ./a.sqsh, container_mounts: ['./a:/b:ro', '/c:/c'], gpu: h200}}\n"
    recipe = load(write("a.yaml", BASE + more + mounts))
    there = tmp_path / "there"
    assert recipe.policy.model_name == recipe.policy.tokenizer.name == recipe.teacher.model_name == str(there / "model")
    assert recipe.data.train.data_path == str(there / "rows.jsonl")
    assert recipe.data.train.prompt_file == str(tmp_path / "prompt.txt")
    assert recipe.value.model_name == "Qwen/Qwen3-8B"
    train = recipe.cluster.train
    assert (train.container_image, train.gpu) == (str(there / "a.sqsh"), "h200")
    assert train.container_mounts == [f"{there}/a:/b:ro", "/c:/c"]
    assert recipe.run_dir == str(tmp_path / "here/runs/a")
    config.write(recipe, tmp_path / "written.yaml")
    assert config.read(tmp_path / "written.yaml") == recipe


def test_paths_on_the_command_line_are_relative_to_the_working_directory(write, tmp_path, monkeypatch):
    recipe = load(write("a.yaml"), "data.train.data_path=other.jsonl", "run_dir=../out", "policy.model_name=~/m")
    assert recipe.data.train.data_path == str(tmp_path / "here/other.jsonl")
    assert recipe.run_dir == str(tmp_path / "out")
    monkeypatch.setenv("HOME", "/home/u")
    assert load(write("a.yaml"), "policy.model_name=~/m").policy.model_name == "/home/u/m"


def test_each_parents_paths_are_relative_to_its_folder(write, tmp_path):
    write("parent.yaml")
    (tmp_path / "child.yaml").write_text("defaults: there/parent\ndata: {validation: {data_path: v.jsonl, env_name: e}}\n")
    recipe = load(str(tmp_path / "child.yaml"))
    assert recipe.data.train.data_path == str(tmp_path / "there/rows.jsonl")
    assert recipe.data.validation.data_path == str(tmp_path / "v.jsonl")


def test_output_paths_are_relative_to_the_working_directory(write, tmp_path):
    recipe = load(write("a.yaml"), "policy.model_name=runs/sft/hf")
    assert recipe.policy.model_name == str(tmp_path / "here/runs/sft/hf")
    path = write("b.yaml", BASE.replace("model_name: model", "model_name: runs/sft/hf"))
    assert load(path).policy.model_name == str(tmp_path / "here/runs/sft/hf")


def test_a_computed_path_is_relative_to_the_recipe_too(write, tmp_path):
    path = write("a.yaml", BASE.replace("rows.jsonl", "'${name}/${algorithm}.jsonl'"))
    assert load(path).data.train.data_path == str(tmp_path / "there/a/grpo.jsonl")


def test_a_folder_in_the_working_directory_is_not_taken_for_one_beside_the_recipe(write, tmp_path):
    (tmp_path / "here/other").mkdir()
    loaded = config.inspect(write("a.yaml", BASE.replace("model_name: model", "model_name: other")))
    (problem,) = loaded.problems
    assert (problem.origin, problem.key, problem.code) == (f"{tmp_path}/there/a.yaml:2", "policy.model_name", "ambiguous")
    assert f"{tmp_path}/there" in problem.message and f"{tmp_path}/here/other" in problem.message


# ---- other recipes -----------------------------------------------------------------------------------------------------------


def test_parents_are_shipped_recipes_by_name_and_neighbours_by_path(write, tmp_path):
    write("my_sft.yaml", "defaults: tiny_sft\n")
    path = write("mine.yaml", "defaults: tiny_grpo\nneeds: [tiny_sft, my_sft]\npolicy: {model_name: runs/my_sft/hf}\n")
    assert load(path).needs == ["tiny_sft", str(tmp_path / "there/my_sft.yaml")]
    assert [loaded.recipe.name for loaded in run_order(path, [])] == ["tiny_sft", "my_sft", "mine"]
    assert [loaded.recipe.run_dir for loaded in run_order(path, [])] == [
        str(tmp_path / f"here/runs/{name}") for name in ("tiny_sft", "my_sft", "mine")
    ]
    assert load(write("tiny_grpo.yaml", "defaults: tiny_grpo\ngrpo: {seed: 3}\n")).grpo.seed == 3  # the shipped one's child


@pytest.mark.parametrize("key", ["defaults", "needs"])
def test_the_recipe_that_names_a_missing_one_is_named(write, tmp_path, key):
    path = write("mine.yaml", f"{key}: [tiny_grp]\n" + (BASE if key == "needs" else ""))
    try:
        (problem,) = config.inspect(path).problems
    except config.RecipeError as error:
        (problem,) = error.problems
    assert (problem.origin, problem.key, problem.code) == (f"{path}:1", key, "file-not-found")
    looked = (f"{tmp_path}/there/tiny_grp", f"{tmp_path}/there/tiny_grp.yaml", f"{ROOT}/recipes/tiny_grp.yaml", "tiny_grpo?")
    assert all(name in problem.message for name in looked)


# ---- data sources ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "above", "name", "path"),
    [
        ("dataset_name: gsm8k", "data_path: /a.jsonl", None, "/a.jsonl"),
        ("data_path: /a.jsonl", "dataset_name: gsm8k", "gsm8k", None),
        ("dataset_name: gsm8k", "data_path: null", "gsm8k", None),
        ("dataset_name: gsm8k", "{data_path: /a.jsonl, dataset_name: squad}", "squad", "/a.jsonl"),
    ],
)
def test_one_source_replaces_the_other(write, below, above, name, path):
    write("below.yaml", f"algorithm: sft\npolicy: {{model_name: x}}\ndata: {{train: {{{below}}}}}\n")
    train = load(write("above.yaml", f"defaults: below\ndata: {{train: {{{above.strip('{}')}}}}}\n")).data.train
    assert (train.dataset_name, train.data_path) == (name, path)
    given = [f"data.train.{part.strip().replace(': ', '=')}" for part in above.strip("{}").split(",")]
    train = load(
        write("below.yaml", f"algorithm: sft\npolicy: {{model_name: x}}\ndata: {{train: {{{below}}}}}\n"), *given
    ).data.train
    assert (train.dataset_name, train.data_path) == (name, path)

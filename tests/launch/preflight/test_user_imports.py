"""User code is found next to the recipe, and imported and checked before a run is submitted."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from launch import submit
from launch.governance import inputs
from launch.preflight import input_files, user_imports
from launch.preflight.container_images import _needs
from launch.recipes.trust import Trust
from pipeline import config

ROOT = Path(__file__).parents[3]
RECIPE = """\
defaults: tiny_grpo
data:
  train: {data_path: rows.jsonl, env_name: mine}
  validation: {data_path: rows.jsonl, env_name: mine}
env: {_override_: true, mine: {kind: rewards_of_mine.right}}
"""
CODE = {
    "rewards_of_mine.py": """\
from pipeline.environments.environment import Environment
def right(prompt, answer, expected, **fields): return float(answer == expected)
def level(prompt, answer, level, weight): return 1.0
class Scaled(Environment):
    def __init__(self, scale): ...
    def step(self, prompt, text): ...
class NoStep(Environment):
    def reset(self, prompt): return prompt
def rows(split, seed): return []
async def play(engine, prompt, seed): ...
def not_async(engine, prompt, seed): ...
async def two(engine, prompt): ...
def loss(outputs, batch, counts, *, most=1.0): return most * -outputs.logprobs[batch.loss_mask].sum() / counts.tokens
def mean(outputs, batch, counts): return -outputs.logprobs.mean()
""",
    "needs_torch.py": "import no_such_package\ndef right(prompt, answer): return 1.0\n",
    "broken.py": "print('noise')\nright = nonsense\n",
    "unread.py": "def right(:\n",
    "slow.py": "import time\ntime.sleep(600)\n",
    "leaves.py": "import os\nos._exit(3)\n",
    "large.py": "everything = bytes(64 << 30)\n",
    "needs_gpu.py": "raise RuntimeError('no GPU here')\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.yaml").write_text(RECIPE)
    (tmp_path / "there/rows.jsonl").write_text(json.dumps({"input": "1+1=", "answer": "2", "level": 1}) + "\n")
    for name, text in CODE.items():
        (tmp_path / "there" / name).write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "there"


def examined(folder, *overrides, executor="local", trust=Trust.EVERYTHING):
    """Return (problems of code and of the columns that it needs, notes about both)."""
    recipe = config.inspect(str(folder / "mine.yaml"), list(overrides)).recipe
    notes, of_data = [], []
    replies = user_imports.probe(recipe, trust)
    of_files = input_files.problems(recipe, notes=of_data, fields=user_imports.fields(recipe, replies))
    columns = [problem for problem in of_files if problem.code in ("missing-column", "bad-record")]
    problems = list(map(str, [*columns, *user_imports.problems(recipe, executor, notes, replies)]))
    return problems, [*(note for note in of_data if note.startswith("env.")), *notes]


def test_a_function_next_to_the_recipe_is_found_from_any_folder(folder):
    assert examined(folder) == ([], [])
    recipe = config.inspect(str(folder / "mine.yaml")).recipe
    assert recipe.module_folders == [str(folder)]
    assert user_imports.folder_of(user_imports.code_references(recipe)[0], recipe) == folder
    given = config.inspect(str(folder / "mine.yaml"), ["module_folders=[lib]", "env.mine.kind=a.b"]).recipe.module_folders
    assert given == [f"{os.getcwd()}/lib", str(folder), os.getcwd()]
    assert config.inspect("tiny_grpo").recipe.module_folders == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("env.mine.kind=rewards.right", "rewards.right: there is no module rewards; looked in "),
        ("env.mine.kind=rewards_of_mine.wrong", "rewards_of_mine ({folder}/rewards_of_mine.py) has no wrong"),
        ("env.mine.kind=rewards_of_mine.rigth", "({folder}/rewards_of_mine.py) has no rigth; did you mean right?"),
        ("env.mine.kind=rewards_of_mine.Scaled env.mine.kwargs.scal=1", "kwargs do not fit Scaled(scale)"),
        ("env.mine.kind=rewards_of_mine.NoStep", "the class is abstract; expected a class that defines step"),
        (
            "env.mine.kind=rewards_of_mine.level",
            "needs weight, but the records of data.train have: input, answer, level. Try a default for it",
        ),
        (
            "data.train.output_key=solution",
            "needs expected, but the records of data.train have: input, answer, level. Try data.train.output_key=answer",
        ),
        ("env.mine.kind=needs_torch.right", "needs_torch.py imports no_such_package, which is not installed here"),
        ("env.mine.kind=broken.right", "nonsense"),
        ("rollout=rewards_of_mine.not_async", "rollout: rewards_of_mine.not_async: got a function that is not async; expected"),
        (
            "rollout=rewards_of_mine.two",
            "rollout: rewards_of_mine.two: got parameters (engine, prompt); expected (engine",
        ),
        (
            "loss_fn.custom=rewards_of_mine.loss loss_fn.custom_kwargs.least=1",
            "loss_fn.custom_kwargs: rewards_of_mine.loss: ",
        ),
        ("env.mine.kind=unread.right", "cannot be imported: SyntaxError: "),
        (
            "data.train={_override_: true, dataset_name: rewards_of_mine.columns}",
            "data.train.dataset_name: rewards_of_mine.col",
        ),
    ],
)
@pytest.mark.parametrize("trust", [Trust.EVERYTHING, Trust.LISTED])
def test_wrong_user_code_is_refused_whether_it_is_imported_or_read(folder, overrides, says, trust):
    problems, notes = examined(folder, *(shlex.split(overrides) if "{" not in overrides else [overrides]), trust=trust)
    assert says.format(folder=folder) in problems[0], problems
    assert len(notes) == (trust is Trust.LISTED)


def test_a_rollout_and_a_loss_are_checked_and_recorded(folder):
    given = ("rollout=rewards_of_mine.play", "loss_fn.custom=rewards_of_mine.loss", "loss_fn.custom_kwargs.most=2.0")
    assert examined(folder, *given) == ([], [])
    recipe = config.inspect(str(folder / "mine.yaml"), given).recipe
    recorded = {entry["key"]: entry for entry in inputs.of_recipe(recipe) if entry["role"] == "code"}
    assert recorded.keys() == {"env.mine.kind", "rollout", "loss_fn.custom"}
    assert all(entry["files"][0]["path"] == str(folder / "rewards_of_mine.py") for entry in recorded.values())
    (problem,), _ = examined(folder, "loss_fn.custom=rewards_of_mine.mean")  # a call on a tiny batch shows it
    assert "rewards_of_mine.mean: its gradient depends on the microbatches" in problem


@pytest.mark.parametrize("trust", [Trust.EVERYTHING, Trust.LISTED])
def test_arguments_that_only_star_star_fields_takes_are_noted(folder, trust):
    (folder / "rewards_of_mine.py").write_text("def right(prompt, answer, expected, *, bonus=1.0, **fields): return 1.0\n")
    problems, notes = examined(folder, "env.mine.kwargs={bonos: 2.0, bonus: 2.0, scale: 3.0}", trust=trust)
    assert problems == [] and [note for note in notes if note.startswith("env.mine.kwargs")] == [
        "env.mine.kwargs.bonos: only **fields of rewards_of_mine.right takes it. Did you mean bonus?",
        "env.mine.kwargs.scale: only **fields of rewards_of_mine.right takes it. Try a parameter scale",
    ]


@pytest.mark.parametrize("name", ["level", "expected"])
def test_an_argument_that_replaces_a_field_of_the_records_is_noted(folder, name):
    (folder / "rewards_of_mine.py").write_text("def right(prompt, answer, level, expected, weight=1.0): return 1.0\n")
    problems, notes = examined(folder, f"env.mine.kwargs={{{name}: 7, weight: 2.0}}")
    assert problems == [] and notes == [
        f"env.mine.kwargs.{name}: it replaces '{name}' of the records of data.{data}. Try another name to keep both"
        for data in ("train", "validation")
    ]
    (folder / "rewards_of_mine.py").write_text(CODE["rewards_of_mine.py"].replace("scale", name))
    assert examined(folder, "env.mine.kind=rewards_of_mine.Scaled", f"env.mine.kwargs.{name}=7") == ([], [])


@pytest.mark.parametrize("trust", [Trust.EVERYTHING, Trust.LISTED])
def test_fields_that_a_function_needs_are_checked_in_generated_data(folder, trust):
    generated = RECIPE.replace("data_path: rows.jsonl, ", "").replace(".right", ".level")
    (folder / "mine.yaml").write_text(generated)
    problems, _ = examined(folder, trust=trust)
    assert "rewards_of_mine.level needs level, but the records of data.train have: input, output, answer. Try" in problems[0]
    assert examined(folder, "env.mine.kwargs.level=1", "env.mine.kwargs.weight=2", trust=trust)[0] == []


def test_the_working_directory_is_searched_last(folder):
    here = folder.parent / "here"
    (here / "of_the_project.py").write_text("def right(prompt, answer): return 1.0\n")
    (here / "rewards_of_mine.py").write_text("raise SystemExit(77)\n")
    (here / "random.py").write_text("raise SystemExit(77)\n")
    recipe = (folder / "mine.yaml").read_text()
    assert examined(folder) == ([], [])
    (folder / "mine.yaml").write_text(recipe.replace("rewards_of_mine.right", "of_the_project.right"))
    assert examined(folder) == ([], [])


def test_an_import_error_names_the_searched_folders_and_how_to_add_one(folder):
    (problem,), _ = examined(folder, "env.mine.kind=rewards.right")
    assert str(folder) in problem and problem.endswith(
        "Try to move it beside the recipe's file, or to add its folder to module_folders=[FOLDER] or PYTHONPATH"
    )


@pytest.mark.parametrize(
    ("module", "why"),
    [("needs_torch", "it imports no_such_package, which is not installed here"), ("needs_gpu", "RuntimeError: no GPU here")],
)
def test_code_that_only_ranks_can_import_is_noted_and_its_source_is_checked(folder, module, why):
    elsewhere = ["cluster.generate.container_image=image", f"env.mine.kind={module}.right"]
    if module == "needs_gpu":
        (folder / "needs_gpu.py").write_text(CODE["needs_gpu.py"] + "def right(prompt, answer): return 1.0\n")
    problems, (note,) = examined(folder, *elsewhere, executor="slurm")
    assert problems == [] and why in note and "the ranks of cluster.generate may have what it needs" in note
    problems, _ = examined(folder, elsewhere[0], f"env.mine.kind={module}.wrong", executor="slurm")
    assert problems == [f"env.mine.kind: {module}.wrong: {module} ({folder}/{module}.py) has no wrong"]


def test_code_that_only_an_image_has_is_noted(folder):
    given = ("cluster.generate.container_image=image", "env.mine.kind=in_the_image.env.Mine")
    problems, (note,) = examined(folder, *given, executor="slurm")
    assert problems == [] and note.endswith("it is not here; the ranks of cluster.generate may have it")
    (problem,), _ = examined(folder, given[1], executor="slurm")
    assert "there is no module in_the_image" in problem


def test_a_components_python_path_is_searched(folder):
    (folder / "lib").mkdir()
    (folder / "lib/far_away.py").write_text("def right(prompt, answer): return 1.0\n")
    path = f"cluster.generate.env_vars.PYTHONPATH={folder}/lib"
    assert examined(folder, path, "env.mine.kind=far_away.right") == ([], [])
    assert examined(folder, "env.mine.kind=far_away.right")[0] != []


def test_a_data_set_next_to_the_recipe_is_found(folder):
    given = "data.train={_override_: true, dataset_name: rewards_of_mine.rows, env_name: mine}"
    assert examined(folder, given) == ([], [])
    recipe = config.inspect(str(folder / "mine.yaml"), [given]).recipe
    assert [problem for problem in input_files.problems(recipe, [], []) if "dataset_name" in str(problem)] == []


@pytest.mark.parametrize(("module", "why"), [("slow", "importing it takes more than 1 s"), ("leaves", "ended with status 3")])
def test_code_that_hangs_is_noted(folder, monkeypatch, module, why):
    monkeypatch.setattr(user_imports, "PROBE_S", 1.0 if module == "slow" else 30.0)
    problems, (note,) = examined(folder, f"env.mine.kind={module}.right")
    assert problems == [] and why in note


def test_code_that_takes_all_memory_is_refused(folder):
    (problem,), _ = examined(folder, "env.mine.kind=large.right")
    assert "large.right cannot be imported: MemoryError" in problem


def test_the_folder_must_be_mounted(folder):
    recipe = config.inspect(str(folder / "mine.yaml")).recipe
    wanted = {need.purpose: need.path for need in _needs(recipe, "generate", [])}
    assert wanted["the module of env.mine.kind"] == folder
    assert "the module of env.mine.kind" not in {need.purpose for need in _needs(recipe, "train", [])}


# ---- the page's example ------------------------------------------------------------------------------------------------------

SUM = {"input": "12+7=", "answer": "19"}
SMALL = [  # a step of it on two processes
    *(
        "needs=[]",
        "policy.model_name=" + str(ROOT / "recipes/tiny"),
        "policy.random_init=true",
        "policy.generation.max_num_seqs=8",
    ),
    *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4"),
    *("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("cluster.train.ranks_per_node=1", "cluster.generate.ranks_per_node=1", "policy.generation.backend=transformers"),
    *("policy.generation.vllm_kwargs={_override_: true}", "cluster.executor=local"),
]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Write the files of the page's example into a folder that is not the working directory; return its recipe's path."""
    page = (ROOT / "pipeline/environments/README.md").read_text()
    blocks = re.findall(r"```(?:python|yaml)\n# (my_(?:reward|grpo)\.\w+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["my_reward.py", "my_grpo.yaml"] and json.dumps(SUM) in page
    (tmp_path / "there").mkdir()
    for name, text in blocks:
        (tmp_path / "there" / name).write_text(text)
    (tmp_path / "there/sums.jsonl").write_text(f"{json.dumps(SUM)}\n" * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "there/my_grpo.yaml"


def test_the_pages_reward_is_submitted_from_the_page(example, capsys):
    assert submit.main([f"recipe={example}", "dry_run=true", "cluster.executor=local"]) == 0, capsys.readouterr().err
    assert f"data_path: {example.parent}/sums.jsonl" in capsys.readouterr().out


@pytest.mark.full
def test_the_pages_reward_runs_from_the_page(example, capsys):
    assert submit.main([f"recipe={example}", *SMALL]) == 0, capsys.readouterr().out
    rollouts = [json.loads(line) for line in (example.parents[1] / "runs/my_grpo/rollouts/step_000001.jsonl").open()]
    assert len(rollouts) == 4 and not any("failure" in rollout for rollout in rollouts)
    for rollout in rollouts:
        assert rollout["task"]["record"] == SUM
        assert rollout["reward"] in (0.0, 1.0)


@pytest.mark.parametrize("function", ["rewards_of_mine.right", "rewards_of_mine.optional"])
def test_a_misspelt_column_is_reported_whether_the_function_needs_it_or_not(folder, function):
    with open(folder / "rewards_of_mine.py", "a") as file:
        file.write("def optional(prompt, answer, expected=None): return 1.0\n")
    (problem, *_), _ = examined(folder, f"env.mine.kind={function}", "data.train.output_key=anwser")
    assert problem == "data.train.output_key: got anwser; expected one of the columns input, answer, level. Try answer"


@pytest.mark.parametrize(
    ("function", "columns", "missing", "field"),
    [("right", {"input": "1+1="}, "answer", "expected"), ("graded", {"input": "1+1=", "answer": "2"}, "level", "level")],
)
def test_a_later_record_without_a_needed_column_is_refused_or_dropped(folder, function, columns, missing, field):
    with open(folder / "rewards_of_mine.py", "a") as file:
        file.write("def graded(prompt, answer, level): return 1.0\n")
    with open(folder / "rows.jsonl", "a") as file:
        file.write(json.dumps(columns) + "\n")
    kind = f"env.mine.kind=rewards_of_mine.{function}"
    (problem, _), _ = examined(folder, kind)  # the same in data.validation
    assert problem == (
        f"data.train.data_path: {folder}/rows.jsonl:2: has no '{missing}'; it has: {', '.join(columns)}."
        " Try to fix it, or data.bad_records=drop"
    )
    assert examined(folder, kind, "data.bad_records=drop") == ([], [])
    given = f"env.mine.kwargs.{field}=1"  # the recipe gives it, so that no record needs it
    problems, notes = examined(folder, kind, given)
    assert problems == [] and len(notes) == 2 and all(f".{field}: it replaces '{field}'" in note for note in notes)


REWARDS = """\
import asyncio, functools
def of_trl(prompts, completions, answer, **columns): return [1.0]
async def of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
class Called:
    def __init__(self, scale=1.0): ...
    def __call__(self, prompt, answer, level): return 1.0
given = functools.partial(of_trl, weight=1.0)
def typo(completions, levle): return [1.0]
def unnamed(completions, /): return [1.0]
open("{ran}", "a").write("imported")
"""


@pytest.mark.parametrize("trust", [Trust.EVERYTHING, Trust.LISTED])
def test_several_rewards_in_a_file_are_checked_whether_they_are_imported_or_read(folder, trust):
    """A path is relative to the recipe's folder. A dry run of a stranger's recipe runs none of it."""
    (folder / "sub").mkdir()
    (folder / "sub/rewards-1.py").write_text(REWARDS.replace("{ran}", str(folder / "ran")))

    def checked(*entries):
        rewards = ", ".join(entry if "{" in entry else f"{{fn: 'sub/rewards-1.py:{entry}'}}" for entry in entries)
        lines = RECIPE.replace("kind: rewards_of_mine.right", f"rewards: [{rewards}]")
        (folder / "mine.yaml").write_text(lines)
        return examined(folder, trust=trust)[0]

    scaled = "{fn: 'sub/rewards-1.py:Called', kwargs: {scale: 2}}"
    of_verl = "{fn: 'sub/rewards-1.py:of_verl', kwargs: {data_source: sums}}"
    assert checked("of_trl", of_verl, scaled, "given", "{fn: exact_match}") == []
    assert (folder / "ran").exists() == (trust is Trust.EVERYTHING)
    (first, *_) = checked("of_trl", "of_verl")
    assert first.startswith("env.mine.rewards[1].fn: ") and "of_verl needs data_source, but the records of data.train" in first
    (first, *_) = checked("typo")
    assert first.endswith("Did you mean level?")
    (first, *_) = checked("unnamed")
    assert "of which some have no name for the caller" in first
    (first, *_) = checked("{fn: 'sub/rewards-1.py:Called', kwargs: {scal: 2}}")
    assert first.startswith("env.mine.rewards[0].kwargs: ") and "kwargs do not fit Called(scale" in first


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        (["env.mine.kind=rewards_of_mine.wrong"], "env.mine.kind", "not-importable"),
        (["env.mine.kind=rewards.right"], "env.mine.kind", "not-importable"),
        (["env.mine.kind=rewards_of_mine.level", "env.mine.kwargs={bonuss: 1}"], "env.mine.kwargs", "unknown-key"),
        (["env.mine.kind=rewards_of_mine.NoStep"], "env.mine.kind", "wrong-type"),
    ],
)
def test_codes_of_wrong_user_code(folder, overrides, key, code):
    recipe = config.inspect(str(folder / "mine.yaml"), overrides).recipe
    (problem,) = user_imports.problems(recipe, "local", [], user_imports.probe(recipe))
    assert (problem.key, problem.code) == (key, code)

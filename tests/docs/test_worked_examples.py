"""The worked examples of the pages, run from the pages: put into a copy of the code, checked, and trained."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

ONE_STEP = (
    *("cluster.executor=local", "cluster.train.ranks_per_node=1", "checkpointing.enabled=false", "data.validation=null"),
    "data.train.kwargs={size: 64, digits: [1, 2]}",
)
ONE_ROLLOUT = (
    *("needs=[]", f"policy.model_name={ROOT / 'recipes/tiny'}", "policy.random_init=true", "policy.generation.max_num_seqs=8"),
    *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4"),
    *("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("cluster.generate.ranks_per_node=1", "policy.generation.backend=transformers", "checkpointing.enabled=false"),
    *("policy.generation.vllm_kwargs={_override_: true}", "cluster.executor=local", "cluster.train.ranks_per_node=1"),
)


def run(folder: Path, *command: str, timeout_s: float = 300) -> subprocess.CompletedProcess:
    """Run Python in a copy of the code."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def page_commands(page: Path, folder: Path) -> list[list[str]]:
    """Return the Python commands of the block that follows a page's last file of its worked example."""
    found = pages.blocks(page)
    last = max(number for number, block in enumerate(found) if block.path and (folder / block.path).exists())
    lines = next(block.text for block in found[last:] if block.language == "sh").splitlines()
    assert all(line.startswith("python ") for line in lines), lines
    return [line.split()[1:] for line in lines]


def steps(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Return a function of a page, which gives a copy of the code with its worked example."""
    copies = {}

    def copy(page: Path) -> Path:
        if page not in copies:
            copies[page] = pages.copy_of_the_code(tmp_path_factory.mktemp("copy"))
            pages.apply(page, copies[page])
        return copies[page]

    return copy


EXAMPLES = [page for page in pages.PAGES if pages.files(page)]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_pass_the_projects_lint(example, page):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is absent: pip install '.[dev]'")
    folder = example(page)
    files = [file for file in pages.files(page) if file.endswith(".py")]
    assert files
    for command in (("check", "--no-cache"), ("format", "--check", "--no-cache")):
        done = run(folder, "-m", "ruff", *command, "--config", "pyproject.toml", *files)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- an algorithm -----------------------------------------------------------------------------------------------------------

ALGORITHMS = ROOT / "pipeline/algorithms/README.md"


def test_the_algorithm_has_its_keys(example):
    folder = example(ALGORITHMS)
    explain, train, variant = page_commands(ALGORITHMS, folder)
    assert "focal.gamma: number, at least 0; default 2.0" in run(folder, *explain).stdout
    refused = run(folder, *train, "focal.gamma=0")
    assert refused.returncode == 2 and "focal.gamma: got 0" in refused.stderr and "[has-no-effect]" in refused.stderr
    refused = run(folder, *variant, "median_grpo.num_generations_per_prompt=1")
    assert refused.returncode == 2 and "median_grpo.num_generations_per_prompt: got 1" in refused.stderr


@pytest.mark.full  # by default: tests/launch/preflight/test_user_imports.py and tests/algorithms/test_custom_loss.py
def test_a_loss_is_checked_before_submission(example):
    folder = example(ALGORITHMS)
    command = ("launch/submit.py", "recipe=mine/my_loss.yaml", "trust=true", "dry_run=true", *ONE_ROLLOUT)
    assert run(folder, *command).returncode == 0
    (folder / "mine/my_loss.py").write_text("def mean(outputs, batch, counts): return -outputs.logprobs.mean()\n")
    refused = run(folder, *command, "loss_fn={custom: my_loss.mean, custom_kwargs: {_override_: true}}")
    assert refused.returncode == 2 and "its gradient depends on the microbatches" in refused.stderr


@pytest.mark.full
def test_the_algorithm_trains(example):
    folder = example(ALGORITHMS)
    train, variant = page_commands(ALGORITHMS, folder)[-2:]
    assert train[-1] == "run_dir=runs/focal" and variant[-1] == "run_dir=runs/median"
    quick = (*ONE_STEP, "focal.val_at_end=false", "focal.max_num_steps=2", "policy.train_global_batch_size=8")
    done = run(folder, *train, *quick, "policy.scheduler=null")
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = steps(folder / "runs/focal")
    assert second["train/loss"] < first["train/loss"] and 0 < second["train/weight"] < first["train/weight"] < 1
    few = ("median_grpo.max_num_steps=2", "median_grpo.num_prompts_per_step=4", "policy.train_global_batch_size=64")
    done = run(folder, *variant, "cluster.executor=local", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["step"] for step in steps(folder / "runs/median") if "train/reward" in step] == [1, 2]


@pytest.mark.full
def test_the_algorithms_command_runs_as_it_stands(example):
    folder = example(ALGORITHMS)
    done = run(folder, *page_commands(ALGORITHMS, folder)[-2], "run_dir=runs/as_it_stands", "cluster.executor=local")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [step["train/loss"] for step in steps(folder / "runs/as_it_stands") if "train/loss" in step]
    assert len(losses) == 20 and losses[-1] < losses[0]


# ---- an environment ---------------------------------------------------------------------------------------------------------

ENVIRONMENTS = ROOT / "pipeline/environments/README.md"
JUDGE = """
from pipeline.config import load
from pipeline.environments.build_environments import build
from pipeline.types import Prompt
recipe = load("my_nearness.yaml")
environment = build(recipe.env)["addition"]
prompt = Prompt(0, None, "addition", {"answer": "19"})
print([environment.step(environment.reset(prompt), text).reward for text in ("it is 19", "18", "100", "none")])
"""


@pytest.mark.full
def test_the_environment_has_its_keys(example):
    folder = example(ENVIRONMENTS)
    write, explain, train = page_commands(ENVIRONMENTS, folder)
    assert run(folder, *write).returncode == 0
    assert "## env.NAME.kwargs with kind: nearness" in (folder / "recipes/KEYS.md").read_text()
    assert "env.NAME.kwargs.tolerance: number, above 0; default 10.0" in run(folder, *explain).stdout
    refused = run(folder, *train, "env.addition.kwargs.tolerance=0")
    assert refused.returncode == 2 and "env.addition.kwargs.tolerance: got 0; expected above 0 [too-small]" in refused.stderr


def test_the_environment_judges(example):
    judged = run(example(ENVIRONMENTS), "-c", JUDGE)
    assert judged.stdout.strip() == "[1.0, 0.8, 0.0, 0.0]", judged.stderr


@pytest.mark.full  # by default: tests/end_to_end/test_user_rollout.py
def test_the_rollout_plays(example):
    """The second turns follow the example's words, which the loss leaves out."""
    folder = example(ENVIRONMENTS)
    done = run(folder, "launch/submit.py", "recipe=mine/second_try.yaml", *ONE_ROLLOUT, "policy.max_total_sequence_length=64")
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (folder / "runs/second_try/rollouts/step_000001.jsonl").open()]
    told = [[turn["told"] for turn in rollout["turns"]] for rollout in rollouts if not rollout["reward"]]
    assert len(rollouts) == 4 and told and all(texts == ["\nthat is wrong; try again: ", ""] for texts in told)
    (step,) = [step for step in steps(folder / "runs/second_try") if "train/reward" in step]
    assert step["train/env_failures"] == step["train/broke_judge"] == 0


AGENTS = ROOT / "pipeline/rollout/agents/README.md"


@pytest.mark.full
def test_the_agent_plays(example):
    """Each episode is the agent's, and what it printed was judged."""
    folder = example(AGENTS)
    done = run(folder, *page_commands(AGENTS, folder)[-1], *ONE_ROLLOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (folder / "runs/my_agent/rollouts/step_000001.jsonl").open()]
    assert len(rollouts) == 4 and all(rollout["conversations"] == 1 and not rollout.get("broke") for rollout in rollouts)
    told = {turn["told"] for rollout in rollouts for turn in rollout.get("turns", [])[:-1]}
    assert not told or all("a number" in text for text in told)


@pytest.mark.full
def test_the_environment_trains(example):
    folder = example(ENVIRONMENTS)
    train = page_commands(ENVIRONMENTS, folder)[-1]
    done = run(folder, *train, *ONE_ROLLOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (folder / "runs/my_nearness/rollouts/step_000001.jsonl").open()]
    assert len(rollouts) == 4 and all(0 <= rollout["reward"] <= 1 for rollout in rollouts)
    assert steps(folder / "runs/my_nearness")[0]["train/broke_judge"] == 0


SUMS = {"input": "12+7=", "answer": "19"}
SAID = ("19", "18", "it is 19", "")
REWARDS = """
from pipeline.config import load
from pipeline.environments.build_environments import build
from pipeline.types import Prompt
recipe = load("my_gdpo.yaml")
environment = build(recipe.env)["sums"]
for said in {said}:
    outcome = environment.step(environment.reset(Prompt(0, None, "sums", {task})), said)
    print(outcome.reward, [outcome.metrics.get(f"reward/{{reward.label}}") for reward in recipe.env["sums"].rewards])
"""


@pytest.fixture
def rewards(tmp_path):
    """Write the files of the page's rewards, which have no folder, and the records that it shows."""
    for block in pages.blocks(ENVIRONMENTS):
        if block.path and "/" not in block.path:
            (tmp_path / block.path).write_text(block.body)
    (tmp_path / "sums.jsonl").write_text(f"{json.dumps(SUMS)}\n" * 4)
    return tmp_path


def test_the_rewards_of_trl_and_verl_are_judged_and_submitted(rewards):
    """19: 2 x 1 + 1 + 0.5 / 2 + 1, and an empty answer has no `short_reward`."""
    task = {"text": SUMS["input"], "answer": SUMS["answer"], "record": SUMS}
    judged = run(ROOT, "-c", f"import os; os.chdir({str(rewards)!r}){REWARDS.format(said=SAID, task=task)}")
    assert judged.stdout.splitlines() == [
        "4.25 [1.0, 1.0, 0.5, 1.0]",
        "1.25 [0.0, 1.0, 0.5, 0.0]",
        "0.0625 [0.0, 0.0, 0.125, 0.0]",
        "0.0 [0.0, 0.0, None, 0.0]",
    ], judged.stderr
    command = next(block.text.split()[1:] for block in pages.blocks(ENVIRONMENTS) if "recipe=my_gdpo.yaml" in block.text)
    command[-1] = f"recipe={rewards}/my_gdpo.yaml"
    dry = run(ROOT, *command, "dry_run=true", "cluster.executor=local")
    assert dry.returncode == 0 and f"fn: {rewards}/from_verl.py:compute_score" in dry.stdout, dry.stderr


@pytest.mark.full
def test_the_rewards_of_trl_and_verl_train(rewards):
    done = run(ROOT, "launch/submit.py", f"recipe={rewards}/my_gdpo.yaml", f"run_dir={rewards}/runs/x", *ONE_ROLLOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    (step,) = (line for line in steps(rewards / "runs/x") if "train/reward" in line)
    names = ("right", "number_reward", "short_reward", "exact_match")
    weights = dict(zip(names, (2, 1, 0.5, 1), strict=True))
    assert step["train/reward"] == pytest.approx(sum(weights[name] * step[f"train/reward/{name}"] for name in names))
    assert all(f"train/reward_std/{name}" in step for name in names) and step["train/broke_judge"] == 0


# ---- a model family ---------------------------------------------------------------------------------------------------------

MODELS = ROOT / "pipeline/models/README.md"
TRAIN = ("launch/submit.py", "recipe=tiny_sft", "policy.megatron_cfg.enabled=true", "run_dir=runs/ministral")


@pytest.mark.full
def test_the_family_passes_the_tests_of_families(example):
    folder = example(MODELS)
    tests, _ = page_commands(MODELS, folder)
    done = run(folder, *tests, "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 4, done.stdout


@pytest.mark.full
def test_the_family_trains_on_megatron_core(example):
    folder = example(MODELS)
    model = folder / "tiny_ministral"
    model.mkdir()
    for file in (ROOT / "recipes/tiny").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    known = json.loads((model / "config.json").read_text())
    config = known | {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "sliding_window": 5}
    (model / "config.json").write_text(json.dumps(config))
    quick = (*ONE_STEP, "sft.val_at_end=false", "sft.max_num_steps=2", f"policy.model_name={model}")
    refused = run(ROOT, *TRAIN, *quick)
    assert refused.returncode == 2 and "'ministral'" in refused.stderr and "[unsupported]" in refused.stderr
    done = run(folder, *TRAIN, *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = steps(folder / "runs/ministral")
    assert second["train/loss"] < first["train/loss"]


# ---- a format of evaluations ------------------------------------------------------------------------------------------------

EVALUATION = ROOT / "pipeline/evaluation/README.md"
SVAMP = (
    '{{"ID": "chal-{0}", "Body": "Ann has {0} pens.", "Question": "How many are 2 more?", "Equation": "( {0} + 2 )",'
    ' "Answer": "{1}", "Type": "Addition"}}\n'
)


def svamp(folder: Path) -> tuple[str, ...]:
    """Write data of the format, and return the keys of a small evaluation."""
    for split, begin in (("test", 0), ("train", 50)):
        (folder / f"{split}.jsonl").write_text("".join(SVAMP.format(i, i + 2) for i in range(begin, begin + 6)))
    data = "evaluate.tasks.svamp.data"
    return (
        *(
            f"model={ROOT / 'recipes/tiny'}",
            f"{data}.dataset_name=null",
            f"{data}.data_path={folder}",
            "cluster.executor=local",
        ),
        *("policy.random_init=true", "policy.precision=float32", "policy.generation.backend=transformers"),
        *("policy.hf_config_overrides.max_position_embeddings=1024", "policy.max_total_sequence_length=1024"),
    )


def test_the_formats_records_are_checked(example):
    folder = example(EVALUATION)
    _, evaluate = page_commands(EVALUATION, folder)
    keys = svamp(folder)
    (folder / "test.jsonl").write_text('{"ID": "chal-0", "Question": "?"}\n')
    refused = run(folder, *evaluate[:2], *keys, "dry_run=true", "evaluate.tasks.svamp.format_kwargs.text=x")
    assert refused.returncode == 2 and "svamp.format_kwargs.text" in refused.stderr and "[unknown-key]" in refused.stderr
    refused = run(folder, *evaluate[:2], *keys, "dry_run=true")
    assert refused.returncode == 2 and "test.jsonl:1: has no 'Body'; it has: ID, Question; no record" in refused.stderr


@pytest.mark.full
def test_the_format_is_evaluated(example):
    folder = example(EVALUATION)
    write, evaluate = page_commands(EVALUATION, folder)
    assert run(folder, *write).returncode == 0
    done = run(folder, *evaluate[:2], *svamp(folder), f"run_dir={folder / 'svamp'}")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [json.loads(line) for line in (folder / "svamp/answers/svamp.jsonl").open()]
    assert {answer["question"] for answer in kept} == {f"chal-{i}" for i in range(6)}
    assert all(answer["prompt"].count("nswer:") == 5 and answer["group"] == "Addition" for answer in kept)
    assert json.loads((folder / "svamp/scores.json").read_text())["tasks"]["svamp"]["questions"] == 6


# ---- a tracker --------------------------------------------------------------------------------------------------------------

TRACKERS = ROOT / "pipeline/trackers/README.md"


@pytest.mark.full
def test_the_tracker_has_its_keys(example):
    folder = example(TRACKERS)
    write, explain, train = page_commands(TRACKERS, folder)
    assert run(folder, *write).returncode == 0
    assert "## logger.loss_file" in (folder / "recipes/KEYS.md").read_text()
    assert "logger.loss_file.file: string; default loss.csv" in run(folder, *explain).stdout
    refused = run(folder, *train, "logger.loss_file.file=[a, b]", "dry_run=true")
    assert refused.returncode == 2 and "logger.loss_file.file: got" in refused.stderr


@pytest.mark.full
def test_the_tracker_gets_each_step_once(example):
    folder = example(TRACKERS)
    train = page_commands(TRACKERS, folder)[-1]
    quick = (*ONE_STEP, "sft.val_at_end=false", "sft.max_num_steps=3", "policy.train_global_batch_size=8")
    done = run(folder, *train, *quick, "policy.scheduler=null")
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / "runs/tiny_sft"
    lines = [f"{step['step']},{step['train/loss']}" for step in steps(run_dir)]
    sent = run_dir / "tracking/loss_file/loss.csv"
    assert sent.read_text().splitlines() == lines and len(lines) == 3
    (run_dir / "tracking/loss_file.json").unlink()  # the tracker then says what it has
    assert run(folder, "launch/track.py", f"run={run_dir}").returncode == 0
    assert sent.read_text().splitlines() == lines


# ---- a preflight check ------------------------------------------------------------------------------------------------------

CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"


def test_the_check_refuses(example):
    folder = example(CONTRIBUTING)
    (command,) = page_commands(CONTRIBUTING, folder)
    command = command[: command.index("#")]
    refused = run(folder, *command)
    assert refused.returncode == 2 and "cluster.time_min: got 5; expected more than" in refused.stderr, refused.stderr
    assert refused.stderr.count("[too-small]") == 1
    local = run(folder, *command, "cluster.executor=local")
    assert local.returncode == 0, local.stderr


# ---- a processor of records --------------------------------------------------------------------------------------------------

RECIPES = ROOT / "recipes/README.md"


def test_the_processor_is_checked(example):
    folder = example(RECIPES)
    (check,) = page_commands(RECIPES, folder)
    done = run(folder, *check, "cluster.executor=local")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each_solution drops 1 of the first 3 records" in done.stdout + done.stderr
    untrusted = run(folder, *check[:-2], "dry_run=true", "cluster.executor=local")
    assert "only the job checks what it makes of the records" in untrusted.stdout + untrusted.stderr


@pytest.mark.full
def test_the_processor_trains(example):
    folder = example(RECIPES)
    (check,) = page_commands(RECIPES, folder)
    quick = ("sft.max_num_steps=2", "policy.train_global_batch_size=3", "policy.scheduler=null", "run_dir=runs/solutions")
    done = run(folder, *check[:-2], *ONE_STEP[:-1], *quick, "sft.val_at_end=false", "sft.val_period=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["data/records_dropped"] for step in steps(folder / "runs/solutions") if "train/loss" in step] == [1, 1]

"""A recipe with a generative judge: errors before submission, its component, its plan and its lineage."""

import json
import re

import pytest

from launch.executors.components import components
from launch.executors.local import rank_environments
from launch.executors.slurm import batch_script
from launch.governance import inputs
from launch.plan import backend_choice, estimate, plan_table
from launch.preflight import container_images, input_files, libraries, model_weights, user_imports
from launch.recipes.trust import Trust
from launch.runs import run_setup
from pipeline import config
from pipeline.job.world import WorkerGroups
from tests.launch.model import write_model, write_recipe, write_weights
from tests.problems import named, refused

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKS = {"kind": "llm_judge", "timeout_s": 60, "kwargs": {"request": {"max_tokens": 8}}}


@pytest.fixture
def load(tmp_path):
    """Return load(*overrides) of a recipe with a judge of random weights."""
    write_model(tmp_path / "judge")
    write_weights(tmp_path / "judge")
    judge = {"model_name": str(tmp_path / "judge"), "tokenizer": {"chat_template": TEMPLATE}}
    path = write_recipe(tmp_path, judge=judge, env={"math": ASKS})
    return lambda *overrides: config.load(str(path), list(overrides))


def check(recipe: config.Recipe) -> config.Recipe:
    """Check a recipe as a submission does."""
    recipe, _ = backend_choice.choose(recipe, [])
    found = [*input_files.problems(recipe, []), *model_weights.problems(recipe, []), *libraries.problems(recipe)]
    config.refuse(found)
    return recipe


def test_the_judge_has_ranks_after_all_others(load):
    recipe = check(load("cluster.judge.ranks_per_node=4", "judge.vllm_cfg.tensor_parallel_size=2"))
    workers = WorkerGroups.of(recipe)
    assert (workers.judge, workers.judge_engines) == ((2, 3, 4, 5), ((2, 3), (4, 5)))
    assert [workers.name(rank) for rank in range(6)] == ["train", "generate", *["judge"] * 4]
    assert workers.engine(4) == (4, 5)
    ranks = rank_environments(components(recipe))
    assert [rank["HETSTEP_COMPONENT"] for rank in ranks] == ["train", "generate", *["judge"] * 4]
    assert WorkerGroups.of(load("judge.model_name=null", "env.math={_override_: true, kind: math}")).judge_engines == ()


def test_slurm_gives_it_a_component_and_its_container(load, tmp_path):
    gpus = "policy.deterministic=true", "cluster.judge.gpus_per_node=2", "cluster.train.gpus_per_node=1"
    recipe = load(*gpus, "cluster.generate.gpus_per_node=1", "cluster.judge.container_image=judge.sqsh")
    parts = components(recipe)
    assert parts["judge"].env_vars["VLLM_BATCH_INVARIANT"] == parts["generate"].env_vars["VLLM_BATCH_INVARIANT"] == "1"
    script = batch_script(tmp_path, "a", recipe.cluster, parts)
    assert script.count("#SBATCH hetjob") == 2 and "HETSTEP_RANK=$((2 + SLURM_PROCID))" in script
    assert re.search(r"srun .*--het-group=2 .*--container-image=\S*judge.sqsh", script)
    shared = load("policy.generation.colocated.enabled=true")  # train and generate ranks
    script = batch_script(tmp_path, "a", shared.cluster, components(shared))
    steps = re.findall(r"srun .*(--het-group=\d)( --overlap)?", script)
    assert script.count("#SBATCH hetjob") == 1 and [group for group, _ in steps] == ["--het-group=0"] * 2 + ["--het-group=1"]
    assert steps[0][1] and steps[1][1]
    needed = {str(path.path) for path in container_images._needs(recipe, "judge", [])}
    assert str(tmp_path / "judge") in needed and str(tmp_path / "model") not in needed


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["judge.model_name=null"], ("judge.model_name", "missing-value")),
        (["env.math={_override_: true, kind: math}"], ("judge.model_name", "has-no-effect")),
        (["env.math.timeout_s=10"], ("env.math.timeout_s", "too-small")),
        (["env.outer={kind: tools, kwargs: {judge: math, tools: {calculator: {}}}}"], ("env.outer.timeout_s", "too-small")),
        (["env.math.kwargs.request.min_p=0.1"], ("env.math.kwargs.request.min_p", "has-no-effect")),
        (["env.math.kwargs.request.model=a"], ("env.math.kwargs.request.model", "contradiction")),
        (
            ["env.math.kwargs={url: 'http://h/v1', model: m, request: {messages: []}}", "judge.model_name=null"],
            ("env.math.kwargs.request.messages", "contradiction"),
        ),
        (["env.math.kwargs.request.max_tokens=32"], ("env.math.kwargs.request.max_tokens", "too-large")),
        (["judge.vllm_cfg.tensor_parallel_size=2"], ("judge.vllm_cfg.tensor_parallel_size", "not-divisible")),
        (["judge.vllm_cfg.precision=fp8", "judge.precision=bfloat16"], ("judge.vllm_cfg.precision", "needs-gpu")),
        (
            ["judge.vllm_cfg.quantization_ignored_layer_kws=[a]"],
            ("judge.vllm_cfg.quantization_ignored_layer_kws", "has-no-effect"),
        ),
        (["cluster.share_nodes=true", "cluster.judge.nodes=2"], ("cluster.judge.nodes", "contradiction")),
    ],
)
def test_contradicting_keys_are_refused(load, overrides, problem):
    with refused(problem):
        load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "described", "problem"),
    [
        (["judge.tokenizer.chat_template=null"], {}, ("judge.tokenizer.chat_template", "missing-value")),
        (["judge.tokenizer.chat_template='{% if 1 %}hi{% endif %}'"], {}, ("judge.tokenizer.chat_template", "unsupported")),
        (["judge.model_name=no/such"], {}, ("judge.model_name", "unavailable-model")),
        (["judge.vllm_cfg.max_model_len=100"], {}, ("judge.vllm_cfg.max_model_len", "too-large")),
        (["judge.vllm_kwargs={max_num_seqs: 3}"], {}, ("judge.vllm_kwargs.max_num_seqs", "contradiction")),
        ([], {"architectures": ["LlamaForSequenceClassification"]}, ("judge.model_name", "unavailable-model")),
        ([], {"quantization_config": {"quant_method": "awq"}}, ("judge.model_name", "unsupported")),
        (
            ["judge.vllm_cfg.tensor_parallel_size=3", "cluster.judge.ranks_per_node=3"],
            {},
            ("judge.vllm_cfg.tensor_parallel_size", "not-divisible"),
        ),
        (
            ["env.math.kwargs.columns=[book]", "env.math.kwargs.prompt='{book} {response}'"],
            {},
            ("env.math.kwargs.columns", "missing-column"),
        ),
    ],
)
def test_a_judge_that_cannot_be_served_is_refused(load, tmp_path, overrides, described, problem):
    file = tmp_path / "judge/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | described))
    recipe, _ = backend_choice.choose(load(*overrides), [])
    found = [*input_files.problems(recipe, []), *model_weights.problems(recipe, []), *libraries.problems(recipe)]
    assert named(found) == {problem}, found


def test_missing_weights_are_refused(load, tmp_path):
    (tmp_path / "judge/model.safetensors").unlink()
    assert ("judge.model_name", "file-not-found") in named(model_weights.problems(load()))


VERLS = "data_source, solution_str, ground_truth"


@pytest.mark.parametrize(
    ("parameters", "unused", "needs_tokenizer"),
    [
        ("prompt, answer, **fields", True, False),
        (VERLS, True, False),
        (f"{VERLS}, reward_router_address=None", False, False),
        (f"{VERLS}, reward_router_address, reward_model_tokenizer", False, True),
        (f"{VERLS}, **more", False, False),
    ],
)
def test_code_that_cannot_ask_it_is_reported(load, tmp_path, parameters, unused, needs_tokenizer):
    (tmp_path / "own.py").write_text(f"def score({parameters}):\n    return 1.0\n")
    recipe = load(f"env.math={{_override_: true, kind: '{tmp_path}/own.py:score'}}")
    for trust in (Trust.NOTHING, Trust.EVERYTHING):
        found = user_imports.problems(recipe, "local", [], user_imports.probe(recipe, trust))
        assert named(found) == ({("judge.model_name", "has-no-effect")} if unused else set())
    needed = {str(path.path) for path in container_images._needs(recipe, "generate", [])}
    assert (str(tmp_path / "judge") in needed) is needs_tokenizer


def test_a_plan_has_its_memory(load):
    def planned(*overrides):
        recipe, choice = backend_choice.choose(load("cluster.judge.gpus_per_node=1", *overrides), [])
        return estimate.plan(recipe, choice)

    plan = planned()
    assert plan.judge.parts["weights"] > 2 * plan.shapes["judge"].parameters and "buffers" not in plan.judge.parts
    text = plan_table.text(plan)
    assert re.search(r"^memory of the fullest rank +train +generate +judge$", text, re.MULTILINE)
    assert re.search(r"^judge +an engine's KV cache holds [0-9,]+ tokens: [0-9,]+ sequences of 32", text, re.MULTILINE)
    assert [*plan.problems(), *plan.warnings()] == []
    tight = planned("cluster.judge.gpu_memory_gb=1", "judge.vllm_cfg.gpu_memory_utilization=0.01")
    assert any("cluster.judge" in warning or "judge." in warning for warning in tight.warnings())
    assert planned("judge.model_name=null", "env.math={_override_: true, kind: math}").judge is None


def test_lineage_records_it_and_a_restart_keeps_it(load, tmp_path):
    entries = {entry["key"]: entry for entry in inputs.of_recipe(load())}
    assert entries["judge.model_name"]["path"] == str(tmp_path / "judge")
    elsewhere = "cluster.judge.ranks_per_node=2", "judge.vllm_cfg.tensor_parallel_size=2", "judge.max_num_seqs=3"
    assert not run_setup.differences(load(), load(*elsewhere))
    for other in ("judge.model_name=other", "judge.precision=float32", "judge.vllm_cfg.max_model_len=20"):
        assert other.partition("=")[0] in run_setup.differences(load(), load(other))

"""Our model of lm-evaluation-harness against the harness's own Hugging Face model."""

import functools
import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.algorithms.evaluate import EvaluateConfig, LmEvalConfig
from pipeline.config import RECIPES, Recipe
from pipeline.evaluation import scores
from pipeline.evaluation.answers import AnswerLog
from pipeline.generate import build
from tests.data.test_chat import CHATML
from tests.evaluation import lm_eval_tasks as made
from tests.generate.tiny import load, policy

pytestmark = pytest.mark.full
LONGEST = 128


@pytest.fixture(autouse=True)
def only_these_tasks(monkeypatch):
    """The harness reads all its 14,000 tasks otherwise."""
    import lm_eval.tasks

    from pipeline.evaluation import lm_eval_documents

    quick = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", quick)
    monkeypatch.setattr(lm_eval_documents, "HarnessManager", lambda include_path, **_: quick(include_path=include_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model with peaked distributions, its tokenizer with a chat template, and the tasks."""
    folder = tmp_path_factory.mktemp("model")
    config = AutoConfig.from_pretrained(RECIPES / "tiny")
    config.initializer_range = 0.15
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny")
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "<").replace("<|im_end|>", ">")
    tokenizer.save_pretrained(folder)
    made.write(folder / "tasks", "abcdef+-=;0123456789")
    return folder


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def backend(request, folder):
    engine = build(policy(folder, request.param, max_model_len=LONGEST), engine_ranks=1, rank_in_engine=0, seed=0)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    load(engine, weights.items(), version=0)
    return engine


def recipe_of(folder, **options) -> Recipe:
    harness = LmEvalConfig(**{"tasks": made.NAMES, "include_path": str(folder / "tasks"), **options})
    return Recipe(
        algorithm="evaluate",
        name="lm_eval",
        policy=policy(folder, "transformers", max_model_len=LONGEST),
        evaluate=EvaluateConfig(lm_eval=harness),
    )


def run(recipe, engines, folder, run_dir):
    from pipeline.evaluation.lm_eval_tasks import HarnessRun

    harness = HarnessRun(recipe, AutoTokenizer.from_pretrained(folder))
    harness.ask(engines, AnswerLog(run_dir, harness.name))
    return harness


def theirs(folder, recipe, batch_size=7):
    """Return the harness's results with its Hugging Face model."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    config = recipe.evaluate.lm_eval
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {name: getattr(config, name) for name in ("num_fewshot", "limit", "apply_chat_template", "fewshot_as_multiturn")}
    return lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=LONGEST - 1),
        tasks=config.tasks,
        task_manager=TaskManager(include_path=config.include_path),
        gen_kwargs=config.gen_kwargs or None,
        system_instruction=config.system_instruction,
        bootstrap_iters=0,
        **dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), 42),
        **options,
    )


def compare(ours, other) -> dict[str, tuple[int, float, float, float]]:
    """Check each document's responses; return by task: documents, largest difference, and both values of the first metric."""
    table = {}
    assert ours["samples"].keys() == other["samples"].keys()
    for name, samples in ours["samples"].items():
        largest = 0.0
        for mine, reference in zip(samples, other["samples"][name], strict=True):
            assert mine["doc_id"] == reference["doc_id"] and mine["arguments"] == reference["arguments"]
            for response, expected in zip(mine["resps"], reference["resps"], strict=True):
                (found,), (wanted,) = response, expected
                if isinstance(wanted, str):
                    assert found == wanted
                    continue
                pairs = [(found, wanted)] if isinstance(wanted, float) else [(found[0], wanted[0])]
                scale = max(1.0, abs(pairs[0][1]) / 100)  # the harness adds up in float32
                largest = max([largest, *(abs(a - b) / scale for a, b in pairs)])
                assert isinstance(wanted, float) or found[1] == wanted[1]
        assert largest < 1e-4, name
        mine, reference = ours["results"][name], other["results"][name]
        metrics = [metric for metric in reference if "," in metric and "stderr" not in metric]
        for metric in metrics:
            assert math.isclose(mine[metric], reference[metric], rel_tol=1e-5), (name, metric)
        table[name] = (len(samples), largest, mine[metrics[0]], reference[metrics[0]])
    for name, group in other.get("groups", {}).items():
        assert ours["groups"][name] == group
    return table


def test_each_answer_equals_that_of_the_hugging_face_model(backend, folder, tmp_path):
    recipe = recipe_of(folder)
    harness = run(recipe, made.OneEngine(backend), folder, tmp_path)
    table = compare(harness.results, theirs(folder, recipe))
    assert {rows for rows, *_ in table.values()} == {made.DOCUMENTS} | {2 * made.DOCUMENTS}  # two filters
    print("".join(f"\n{name:20} {rows:4} {difference:.1e} {a:.4f} {b:.4f}" for name, (rows, difference, a, b) in table.items()))
    texts = [sample["resps"][0][0] for sample in harness.results["samples"]["made_until"]]
    assert len(set(texts)) > 5 and any(0 < len(text) < 20 for text in texts)  # some end at a stop string

    summary = scores.summarize(recipe, harness.tasks())
    harness.complete(summary)
    scores.write(tmp_path, summary, scores.values(harness.tasks()))
    tasks = summary["tasks"]
    found = harness.results["results"]
    assert tasks["made_choices"]["metrics"]["acc"]["value"] == pytest.approx(found["made_choices"]["acc,none"])
    assert tasks["made_until"]["metrics"]["exact_match,plain"]["low"] is not None
    bits = tasks["made_perplexity"]["metrics"]["bits_per_byte"]
    assert bits["value"] == pytest.approx(found["made_perplexity"]["bits_per_byte,none"]) and bits["low"] < bits["high"]
    colors = tasks["made_colors"]
    assert colors["questions"] == 2 * made.DOCUMENTS and colors["groups"].keys() == {"made_red", "made_blue"}
    assert colors["metrics"]["acc"]["low"] < colors["metrics"]["acc"]["value"] < colors["metrics"]["acc"]["high"]
    assert tasks["made_long"]["truncated"] > 0.5
    harness.write(tmp_path)
    assert json.loads((tmp_path / "lm_eval_results.json").read_text())["results"] == found


@pytest.mark.parametrize(
    "options",
    [
        {"apply_chat_template": True, "system_instruction": "be brief", "num_fewshot": 2},
        {"apply_chat_template": True, "fewshot_as_multiturn": False, "num_fewshot": 1, "limit": 5},
        {"system_instruction": "sum:", "limit": 0.5, "gen_kwargs": {"max_gen_toks": 5, "until": ["3", ";"]}},
    ],
)
def test_options_mean_the_same(backend, folder, options, tmp_path):
    recipe = recipe_of(folder, **options)
    compare(run(recipe, made.OneEngine(backend), folder, tmp_path).results, theirs(folder, recipe))


def test_a_restart_asks_what_is_missing_and_gives_the_same(backend, folder, tmp_path, monkeypatch):
    from pipeline.evaluation import lm_eval_model

    monkeypatch.setattr(lm_eval_model, "UNIT_TOKENS", 800)
    recipe = recipe_of(folder, gen_kwargs={"do_sample": True, "temperature": 1.0})
    whole = run(recipe, once := made.OneEngine(backend), folder, tmp_path / "whole")
    asked = 0
    for most in (60, 260, 20):
        engines = made.OneEngine(backend, most)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, engines, folder, tmp_path / "killed")
        backend.cut(list(backend.progress()))
        asked += len(AnswerLog(tmp_path / "killed", "lm_eval"))
    resumed = run(recipe, last := made.OneEngine(backend), folder, tmp_path / "killed")
    assert resumed.results["samples"] == whole.results["samples"]
    assert 0 < last.asked < once.asked
    again = made.OneEngine(backend, most=0)
    assert run(recipe, again, folder, tmp_path / "killed").results["results"] == whole.results["results"]
    assert again.asked == 0


def test_sampling_that_engines_lack_is_refused(backend, folder, tmp_path):
    from pipeline.recipe.problems import RecipeError

    recipe = recipe_of(folder, gen_kwargs={"num_beams": 4})
    with pytest.raises(RecipeError, match="num_beams"):
        run(recipe, made.OneEngine(backend), folder, tmp_path)
    with pytest.raises(RecipeError, match="lm_eval has no task made_nothing"):
        run(recipe_of(folder, tasks=["made_nothing"]), made.OneEngine(backend), folder, tmp_path)

"""Tasks on a suite's own data equal lm-evaluation-harness 0.4.13 with its own Hugging Face model, item for item.

pytest -m full tests/evaluation/test_lm_eval_likelihoods.py -s     prints a table
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline import generate
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.lm_eval_tasks import HarnessRun
from pipeline.evaluation.statistics import interval
from tests.evaluation.likelihood_data import recipe, save_model, task_config
from tests.evaluation.lm_eval_reference import THEIRS, evaluate, likelihoods, make_data, task_files
from tests.evaluation.lm_eval_tasks import OneEngine
from tests.generate.tiny import load

pytestmark = pytest.mark.full

ITEMS, SEED, LONGEST = 24, 1234, 512
TINY = Path(__file__).parents[2] / "recipes" / "tiny"
CHAT = {"apply_chat_template": True}
CASES = {
    "plain": ({}, {}),
    "3-shot": ({"num_few_shot": 3}, {"num_fewshot": 3}),
    "chat": (CHAT, CHAT),
    "chat 2-shot turns": ({**CHAT, "num_few_shot": 2}, {**CHAT, "num_fewshot": 2, "fewshot_as_multiturn": True}),
    "chat 2-shot text": (
        {**CHAT, "num_few_shot": 2, "few_shot_as_turns": False},
        {**CHAT, "num_fewshot": 2, "fewshot_as_multiturn": False},
    ),
}
"""Our settings and theirs."""
FLOAT32 = 2e-7
"""Relative error of their sums, which are float32 and beyond -1000 for long documents."""
MODELS = ["llama", "qwen3", "recipes/tiny"]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path, dict[str, list[str]]]:
    """Return the folders of the data and of their tasks, and the names of these."""
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, ITEMS)
    return folder, folder / "tasks", task_files(folder / "tasks", folder)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> tuple[str, Path, int]:
    """Return a model's name, folder and longest text."""
    folder = tmp_path_factory.mktemp("model")
    if request.param != "recipes/tiny":
        return request.param, save_model(folder, request.param, LONGEST), LONGEST
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)).save_pretrained(folder)
    return request.param, folder, 128


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def backend(request, model):
    _, folder, longest = model
    kwargs = {"vllm_kwargs": {"block_size": 32}} if request.param == "vllm" else {}
    ours = recipe(folder, request.param, longest, **kwargs)
    engine = generate.build(ours.policy, 1, 0, 0)
    load(engine, load_file(folder / "model.safetensors").items(), 0)
    return request.param, engine, ours


@pytest.fixture(scope="module")
def theirs(model, files) -> Any:
    """Return a function (case) -> their results, computed once."""
    _, folder, longest = model
    # They count the tokens that they feed: without the last one, which is scored alone.
    made = HFLM(str(folder), device="cpu", dtype="float32", batch_size=8, max_length=longest - 1)
    done: dict[str, Any] = {}

    def of(case: str, forms: list[str]) -> Any:
        if case not in done:
            names = [each for form in forms for each in files[2][form]]
            done[case] = evaluate(made, files[1], names, **CASES[case][1])
        return done[case]

    return of


@pytest.mark.parametrize("case", CASES)
def test_items_and_scores_are_equal(case, model, backend, theirs, files, tmp_path):
    settings = CASES[case][0]
    if model[0] == "recipes/tiny" and settings.get("num_few_shot", 0) + settings.get("apply_chat_template", False):
        pytest.skip("has no chat template, and no room for worked examples")
    # Theirs may show a passage as its own worked example, as lambada has no other split; documents have no prompt.
    left_out = {"documents"} if settings else set()
    left_out |= {"lambada"} if "num_few_shot" in settings else set()
    forms = [form for form in THEIRS if form not in left_out]
    assert len(forms) >= len(THEIRS) - 2
    results, (kind, engine, ours), tokenizer = theirs(case, forms), backend, AutoTokenizer.from_pretrained(model[1])
    for form in forms:
        shots = {"few_shot_split": "dev" if form == "mmlu" else "train"}
        config = task_config(form, files[0] / form, split=THEIRS[form][1], seed=SEED, **shots, **settings)
        ours.evaluate.tasks = {form: config}
        run = HarnessRun(ours, tokenizer)
        run.ask(OneEngine(engine), AnswerLog(tmp_path / form, run.name))
        task, answers = run.tasks()[form]
        names = [f"tiny_{name}" for name in run.documents[form].tasks] if form == "mmlu" else files[2][form]
        expected = [sums for name in names for sums in likelihoods(results["samples"][name])]
        assert len(expected) == len(answers) == ITEMS
        pairs = [
            pair
            for mine, other in zip(answers, expected, strict=True)
            for pair in zip(mine.details["logprobs"], other, strict=True)
        ]
        worst = max(abs(a - b) for a, b in pairs)
        scores = {metric: interval(values.values()).value for metric, values in task.metrics(answers).items()}
        weights = {name: len(results["samples"][name]) / ITEMS for name in names}
        reported = {
            metric: sum(results["results"][name][f"{metric},none"] * weight for name, weight in weights.items())
            for metric in scores
            if f"{metric},none" in results["results"][names[0]]
        }
        shown = "  ".join(f"{metric} {scores[metric]:.4f}/{value:.4f}" for metric, value in reported.items())
        print(f"{model[0]:13} {kind:13} {case:18} {form:11} {worst:.1e}  {shown}")
        assert all(abs(a - b) < max(1e-4, FLOAT32 * abs(b)) for a, b in pairs)
        assert reported and scores == scores | {metric: pytest.approx(value, rel=1e-5) for metric, value in reported.items()}

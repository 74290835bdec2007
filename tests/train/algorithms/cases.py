"""Recipes of every algorithm, and their data: random sequences for tiny models, always the same."""

from __future__ import annotations

import functools
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.algorithms import PAIRED
from pipeline.algorithms.algorithm import Algorithm
from pipeline.config import Recipe, generates
from pipeline.config.loading import complete
from pipeline.config.policy import ServedTokenizerConfig, TeacherConfig
from pipeline.data.teacher_text import at_chunk_ends
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Sample, TeacherTokens, Turn, VersionSpan
from tests.models.cases import SHAPE

LONGEST = 24  # tokens of a sequence
STEPS = 2  # of the algorithm: in the second, the policy is no longer its reference
UPDATES = 2  # optimizer steps in each: in the second, the policy is no longer what the advantages are of
PROMPTS, ANSWERS = 4, 4  # of a step, and of each prompt
PAIRS = 4  # of an update
ENVIRONMENTS = ("any", "other")  # of the prompts, in turn

OTHER_TOKENS = ", other tokens"  # of a teacher that does not read the policy's
IN_LOSS = {"reference_policy_kl_penalty": 0.1}
TEACHERS = {"on_policy_distillation": {"teachers": {"any": "qwen3", "other": "qwen2"}}, "teacher": {"model_name": None}}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "dpo": {"algorithm": "dpo", "dpo": {"sft_loss_weight": 0.1, "label_smoothing": 0.1}},
    "kto": {"algorithm": "kto", "kto": {"undesirable_weight": 0.7}, "data": {"max_input_seq_length": LONGEST - 4}},
    "rm": {"algorithm": "rm"},
    "grpo": {"algorithm": "grpo"},
    "grpo, by sequences, KL, TIS": {
        "algorithm": "grpo",
        "loss_fn": {
            **IN_LOSS,
            "token_level_loss": False,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.2,
        },
    },
    "grpo, entropy bonus": {"algorithm": "grpo", "loss_fn": {"entropy_coeff": 0.1, "ratio_clip_max": 0.05}},
    "gspo": {
        "algorithm": "grpo",
        "loss_fn": {"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_min": 0.01},
    },
    "cispo": {"algorithm": "grpo", "loss_fn": {"use_cispo": True, "ratio_clip_max": 0.1}},
    "grpo, high entropy": {"algorithm": "grpo", "loss_fn": {"top_entropy_quantile": 0.3}},
    "reinforce++, KL in the reward": {
        "algorithm": "grpo",
        "grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}},
        "loss_fn": {**IN_LOSS, "use_kl_in_reward": True},
    },
    "ppo": {"algorithm": "ppo", "value_loss_fn": {"cliprange": 0.05}},
    "distillation": {
        "algorithm": "distillation",
        "distillation": {"topk_logits_k": 8},
        "loss_fn": {"kl_type": "reverse"},
    },
    "distillation, zero outside": {
        "algorithm": "distillation",
        "distillation": {"topk_logits_k": 8},
        "loss_fn": {"zero_outside_topk": True},
    },
    "distillation, two teachers": {"algorithm": "distillation", "distillation": {"topk_logits_k": 8}, **TEACHERS},
    "grpo, two teachers": {
        "algorithm": "grpo",
        "grpo": {"adv_estimator": {"name": "opd"}},
        "loss_fn": {
            "disable_ppo_ratio": True,
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        **TEACHERS,
    },
    "grpo, two tokenizers": {
        "algorithm": "grpo",
        "grpo": {"adv_estimator": {"name": "opd"}},
        "loss_fn": {"disable_ppo_ratio": True},
        **TEACHERS,
        "on_policy_distillation": {"teachers": {"any": "qwen3", "other": f"qwen2{OTHER_TOKENS}"}},
    },
    "distillation, two tokenizers": {
        "algorithm": "distillation",
        "distillation": {"topk_logits_k": 16},
        "loss_fn": {"kl_type": "gold"},
        **TEACHERS,
        "on_policy_distillation": {"teachers": {"any": f"qwen3{OTHER_TOKENS}", "other": f"qwen2{OTHER_TOKENS}"}},
    },
}
FROM_ITSELF = "distillation, from itself"
"""GOLD with the policy as the teacher, which reads the policy's own tokens in chunks: no distribution differs."""
# Adam's step is as long for a small gradient as for a large one, so that rounding of what should be 0 would count as much as
# all else. A large epsilon makes it nearly proportional to the gradient.
OPTIMIZER = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.1, "eps": 1.0, "weight_decay": 0.01}}


def recipe(case: str, model: Path, teacher: Path, layout: dict[str, Any]) -> Recipe:
    """Return an algorithm's recipe. layout: changes of a recipe, as nested dicts."""
    sections = dict(CASES["distillation, two tokenizers" if case == FROM_ITSELF else case])
    if case == FROM_ITSELF:
        teachers = dict.fromkeys(ENVIRONMENTS, f"{model.name}{OTHER_TOKENS}")
        sections["on_policy_distillation"] = {"teachers": teachers}
    if several := sections.get("on_policy_distillation"):
        teachers = {name: _teacher(teacher.parent, described) for name, described in several["teachers"].items()}
        sections["on_policy_distillation"] = {"teachers": teachers}
    update = PAIRS if sections["algorithm"] in PAIRED else PROMPTS * ANSWERS // UPDATES
    policy = {"train_global_batch_size": update, "generation": {"temperature": 0.7}}  # of sft and dpo too, to see more of it
    recipe = changed(_defaults(model, teacher), {"policy": policy})
    return changed(changed(recipe, sections), layout)


def _teacher(folder: Path, described: str) -> TeacherConfig:
    model = str(folder / described.removesuffix(OTHER_TOKENS))
    own = ServedTokenizerConfig(model if described.endswith(OTHER_TOKENS) else None)
    return TeacherConfig(model, precision="float32", tokenizer=own)


@functools.cache  # reading a recipe takes longer than all steps of a case
def _defaults(model: Path, teacher: Path) -> Recipe:
    sampled = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": ANSWERS}
    values = {
        "name": "invariance",
        "run_dir": "runs/invariance",
        "algorithm": "sft",
        "grpo": sampled,
        "ppo": sampled,
        "distillation": sampled,
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": LONGEST,
            "logprob_chunk_size": 16,
            "max_grad_norm": None,
            "optimizer": OPTIMIZER,
            "generation": {"max_new_tokens": LONGEST},
        },
        "value": {"max_grad_norm": None, "optimizer": OPTIMIZER},
        "teacher": {"model_name": str(teacher)},
        "env": {name: {"kind": "exact_match"} for name in ENVIRONMENTS},
        "data": {"train": None, "datasets": {name: {"data_path": "any.jsonl", "env_name": name} for name in ENVIRONMENTS}},
    }
    return complete(values)


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """Return a dataclass with other values in it; a dict changes a dataclass, any other value replaces the old one."""
    values = {}
    for name, value in changes.items():
        found = getattr(config, name)
        values[name] = changed(found, value) if isinstance(value, dict) and is_dataclass(found) else value
    return replace(config, **values)


def samples(recipe: Recipe, algorithm: Algorithm, step: int) -> list[Sample]:
    """Return the samples of a step of an algorithm that samples, or of one update of one that does not."""
    generator = np.random.default_rng(step)
    if generates(recipe):
        drawn = algorithm.compute_advantages([_group(generator, number) for number in range(PROMPTS)])
        teachers = recipe.on_policy_distillation.teachers
        itself = any(teacher.model_name == recipe.policy.model_name for teacher in teachers.values())
        others = {name for name, teacher in teachers.items() if teacher.tokenizer.name}
        drawn = [_in_teacher(generator, one, itself) if one.teacher in others else one for one in drawn]
        return [at_chunk_ends(sample) for sample in drawn] if algorithm.needs.own_top_k else drawn
    if algorithm.paired:
        return [sample for number in range(PAIRS) for sample in _pair(generator, number)]
    # The labels of answers, which only some algorithms read.
    return [_sample(generator, _tokens(generator, 3), float(i % 3 == 0)) for i in range(PROMPTS * ANSWERS // UPDATES)]


def matched(recipe: Recipe) -> dict[str, np.ndarray]:
    """Return teacher -> the policy's ids of its tokens with the same text: random two thirds of them."""
    generator, vocabulary = np.random.default_rng(9), SHAPE["vocab_size"]
    teachers = recipe.on_policy_distillation.teachers
    if any(teacher.model_name == recipe.policy.model_name for teacher in teachers.values()):
        return {name: np.where(np.arange(vocabulary) % 3, np.arange(vocabulary), -1) for name in teachers}
    ids = {name: generator.permutation(vocabulary) for name in teachers}
    return {name: np.where(generator.random(vocabulary) < 2 / 3, of_teacher, -1) for name, of_teacher in ids.items()}


def _tokens(generator: np.random.Generator, least: int, most: int = LONGEST // 2) -> np.ndarray:
    return generator.integers(0, SHAPE["vocab_size"], generator.integers(least, most)).astype(np.int32)


def _group(generator: np.random.Generator, number: int) -> RolloutGroup:
    prompt = Prompt(number, _tokens(generator, 1), ENVIRONMENTS[number % 2], {})
    return RolloutGroup(prompt, tuple(_rollout(generator, f"{number}-{i}") for i in range(ANSWERS)))


def _rollout(generator: np.random.Generator, name: str) -> Rollout:
    """Return log-probs near those of an untrained model."""
    tokens = _tokens(generator, 1)
    logprobs = generator.normal(-np.log(SHAPE["vocab_size"]), 0.5, len(tokens)).astype(np.float32)
    return Rollout((Turn(Completion(name, tokens, logprobs, (VersionSpan(0, len(tokens)),), "stop")),), generator.normal())


def _in_teacher(generator: np.random.Generator, sample: Sample, itself: bool) -> Sample:
    """Return the sample with random tokens of its teacher: chunks of one to three tokens on both sides, and one left out.

    itself: the teacher is the policy, and has the same tokens.
    """
    drawn = np.flatnonzero(sample.loss_mask)
    of_drawn = np.cumsum(generator.random(len(drawn)) < 0.6)  # the chunks begin at 0 or 1
    of_sample = np.full(len(sample.tokens), -1, np.int32)
    of_sample[drawn] = np.where(of_drawn == of_drawn[-1] - 1, -1, of_drawn)
    counted = np.unique(of_sample[of_sample >= 0])
    chunks = np.repeat(counted, generator.integers(1, 4, len(counted)))
    before = _tokens(generator, 1)
    tokens = np.concatenate([before, generator.integers(0, SHAPE["vocab_size"], len(chunks))]).astype(np.int32)
    if itself:
        in_teacher = TeacherTokens(sample.tokens, of_sample, of_sample)
    else:
        in_teacher = TeacherTokens(tokens, np.concatenate([np.full(len(before), -1), chunks]).astype(np.int32), of_sample)
    mask = sample.loss_mask & (of_sample >= 0)
    return replace(sample, in_teacher=in_teacher, loss_mask=mask, logprobs=np.where(mask, sample.logprobs, 0))


def _pair(generator: np.random.Generator, number: int) -> list[Sample]:
    prompt = _tokens(generator, 1)
    return [_sample(generator, prompt, margin) for margin in (0.5 * number, 0.0)]


def _sample(generator: np.random.Generator, prompt: np.ndarray, margin: float) -> Sample:
    tokens = np.concatenate([prompt, _tokens(generator, 1)])
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.arange(len(tokens)) >= len(prompt), zeros, zeros, margin)

"""Translate `env`. In NeMo-RL the section's name selects the class; in Hetstep `kind` does."""

from __future__ import annotations

from typing import get_args, get_type_hints

from launch.recipes.nemo_rl.logger_keys import PRETRAINED
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, Rule, Same, apply, under
from launch.recipes.translation.translator import Translator
from pipeline.config import kind_class
from pipeline.config.config_tree import RECIPES

ENVIRONMENT, VERIFIER = "this environment", "this verifier of answers"
MATH: tuple[Rule, ...] = (
    Only("stop_strings", (None, []), "stop strings", "null"),
    Ignored("num_workers"),
)
REWARD_MODEL: tuple[Rule, ...] = (
    Same("model_name precision hf_config_overrides.* tokenizer.name tokenizer.chat_template_kwargs.*"),
    Only("checkpoint_path", (None,), PRETRAINED, "model_name=FOLDER"),
    Only("reward_model_cfg.enabled", (True,), ENVIRONMENT, "true"),
    Only("reward_model_cfg.reward_model_type", ("bradley_terry",), ENVIRONMENT, "bradley_terry"),
    Changed(
        "dtensor_cfg.tensor_parallel_size dtensor_cfg.context_parallel_size",
        (1,),
        "the reward model has the policy's parallel sizes",
    ),
    Ignored("dtensor_cfg.* megatron_cfg.* resources.* dynamic_batching.* sequence_packing.* generation.*"),
    Ignored("batch_size logprob_batch_size max_model_len max_grad_norm offload_optimizer_for_logprob processor"),
    Ignored("enabled optimizer.* scheduler.* make_sequence_length_divisible_by tokenizer.use_fastokens"),
)
JUDGE: tuple[Rule, ...] = (
    Done("model_name tensor_parallel_size gpu_memory_utilization max_model_len temperature max_tokens stop num_workers"),
    Ignored("max_concurrency log_dir log_conversations"),
)
"""Keys of `llm_judge_async`, which forks of NeMo-RL have (nemo_rl/environments/llm_judge_async_environment.py)."""
JUDGES = ("llm_judge", "llm_judge_async")
SWITCHES = ("should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples")  # not environments
MULTI_REWARD = "math_multi_reward"
KINDS = {"math": MATH, "math_default": MATH, MULTI_REWARD: MATH, "reward_model": REWARD_MODEL}
KINDS |= dict.fromkeys(JUDGES, JUDGE)
LACKING = {"nemo_gym": "NeMo Gym", "vlm": "images, sound or video"}
REWARDS = {"correctness": "correct", "format": "format", "integer": "integer"}
"""Rewards of MULTI_REWARD, in the order of grpo.adv_estimator.reward_weights -> check of our kind answer_tags."""

PUZZLE = "sliding_puzzle_game"
PUZZLE_PROMPT = str(RECIPES / "prompts/sliding_puzzle.txt")


def translate(t: Translator, names: list[str]) -> None:
    """Translate the environments. names: the names of the environments that data sets use."""
    if t.on("env.should_use_nemo_gym"):
        t.lacks("env.should_use_nemo_gym", True, "NeMo Gym")
    for key in SWITCHES:
        t.consume(f"env.{key}")
    if isinstance(t.get(f"env.{PUZZLE}"), dict):
        _puzzle(t)
        names = [PUZZLE]
    for name in t.get("env") or {}:
        if name == PUZZLE or (name in names and name in KINDS and name not in LACKING):
            continue
        if name in names:
            instead = "" if name in LACKING else f"one of: {', '.join(KINDS)}"
            t.lacks(f"env.{name}", "a section", LACKING.get(name, ENVIRONMENT), instead)
            t.consume(f"env.{name}")
        elif isinstance(t.get(f"env.{name}"), dict):
            t.consume(f"env.{name}")
            t.ignore(f"env.{name}", "no data set uses this environment")
    for name in names:
        if name in KINDS:
            _built_in(t, name)


def _built_in(t: Translator, name: str) -> None:
    key = f"env.{name}"
    if not isinstance(t.get(key), dict):
        t.problem(key, "missing-value", f"is not given, but a data set's env_name is {name}")
    elif name == "reward_model":
        t.put(f"{key}.kind", name, key)
        t.put(f"{key}.served_by", "reward", f"{key}.resources.num_nodes")
        apply(t, under(key, REWARD_MODEL))
    elif name in JUDGES:
        _judge(t, key)
        apply(t, under(key, JUDGE))
    else:
        (_several_rewards if name == MULTI_REWARD else _math)(t, key)
        apply(t, under(key, MATH))


def _judge(t: Translator, key: str) -> None:
    """Translate a judge that answers yes or no. `num_workers` of its engines have GPUs besides those of the cluster."""
    t.put(f"{key}.kind", "llm_judge", key)
    t.put(f"{key}.timeout_s", 600.0, key)
    t.put(f"{key}.kwargs.rating", "yes_no", key)
    asked = {"temperature": 0.0, "max_tokens": 512, "stop": None}
    request = {name: value for name, default in asked.items() if (value := t.get(f"{key}.{name}", default)) is not None}
    t.put(f"{key}.kwargs.request", request, key)
    t.put("judge.model_name", t.get(f"{key}.model_name"), f"{key}.model_name")
    served = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.85, "max_model_len": None}
    for name, default in served.items():
        if (value := t.get(f"{key}.{name}", default)) is not None:
            t.put(f"judge.vllm_cfg.{name}", value, f"{key}.{name}")
    engines, size = t.get(f"{key}.num_workers", 1), t.get(f"{key}.tensor_parallel_size", 1)
    if isinstance(engines, int) and isinstance(size, int):
        t.put("cluster.judge.gpus_per_node", engines * size, f"{key}.num_workers")
    t.change(f"{key}.num_workers", "the judge's GPUs are one more node; in NeMo-RL they are some of cluster.gpus_per_node")
    t.change(key, "kwargs.prompt is the prompt, in a chat; NeMo-RL's is a column, and `yes` anywhere in a reply counts")


def _several_rewards(t: Translator, key: str) -> None:
    implementation, weights = t.consume(f"{key}.math_verify_impl"), "grpo.adv_estimator.reward_weights"
    if implementation not in (None, "hf_math_verify"):
        t.lacks(f"{key}.math_verify_impl", implementation, VERIFIER, "one of: hf_math_verify")
    given = t.get(weights) if t.get("grpo.adv_estimator.name") == "gdpo" else None
    if given is not None and not (isinstance(given, list) and len(given) == len(REWARDS)):
        t.problem(weights, "wrong-type", f"got {given}; expected a weight for each of {', '.join(REWARDS)}")
        given = None
    entries = [
        {"fn": "answer_tags", "name": name, "weight": weight, "kwargs": {"check": check}}
        for (name, check), weight in zip(REWARDS.items(), given or [1.0] * len(REWARDS), strict=True)
    ]
    t.put(f"{key}.rewards", entries, key)
    if given:
        t.change(weights, "the reward that is logged is the weighted sum too; in NeMo-RL the sum without weights")


def _math(t: Translator, key: str) -> None:
    """Translate an environment of NeMo-RL's class math, which is `multiple_choice` here for some verifiers, else `math`."""
    kind, implementation = t.consume(f"{key}.verifier_type"), t.consume(f"{key}.math_verify_impl")
    letters, verifiers = _choices("multiple_choice", "verifier_type"), _choices("math", "math_verify_impl")
    if kind in letters:  # math_verify_impl has no effect then, in NeMo-RL either
        t.put(f"{key}.kind", "multiple_choice", key)
        t.put(f"{key}.kwargs.verifier_type", kind, f"{key}.verifier_type")
        t.change(f"{key}.verifier_type", "the last of several letters in an answer counts; in NeMo-RL the first")
        return
    t.put(f"{key}.kind", "math", key)
    if kind not in ("math", None):
        t.lacks(f"{key}.verifier_type", kind, VERIFIER, f"one of: {', '.join(('math', *letters))}")
    if implementation in verifiers:
        t.put(f"{key}.kwargs.math_verify_impl", implementation, f"{key}.math_verify_impl")
    elif implementation is not None:
        t.lacks(f"{key}.math_verify_impl", implementation, VERIFIER, f"one of: {', '.join(verifiers)}")


def _choices(kind: str, argument: str) -> tuple[str, ...]:
    """Return the valid values of a keyword argument of our environment `kind`."""
    return get_args(get_type_hints(kind_class(kind).Arguments)[argument])


def _puzzle(t: Translator) -> None:
    """Translate the sliding puzzle, whose boards are data sets in Hetstep.

    NeMo-RL draws the boards in a separate script (run_grpo_sliding_puzzle.py) and ignores `data`.
    """
    key = f"env.{PUZZLE}"
    config = (t.consume(key) or {}).get("cfg", {})
    t.put(f"{key}.kind", "sliding_puzzle", key)
    if "max_moves" in config:
        t.put(f"{key}.kwargs.max_moves", config["max_moves"], f"{key}.cfg.max_moves")
    prompts = t.get("grpo.num_prompts_per_step", 1) * t.get("grpo.max_num_steps", 1)
    for split, size in (("train", prompts), ("validation", t.get("grpo.max_val_samples") or 256)):
        kwargs = {"size": size, "game_config": dict(config.get("game_config", {}))}
        dataset = {"dataset_name": "sliding_puzzle", "split": split, "env_name": PUZZLE, "prompt_file": PUZZLE_PROMPT}
        t.put(f"data.{split}", {**dataset, "kwargs": kwargs}, f"{key}.cfg.game_config")
    t.change(f"{key}.cfg.game_config", "the data set sliding_puzzle generates the boards of data.train and data.validation")
    t.change(key, "a turn ends with the model's end-of-turn token; in NeMo-RL with the stop string </action>")
    t.change(key, "the game's reply is a turn of the chat template; NeMo-RL appends its bare text to the model's answer")

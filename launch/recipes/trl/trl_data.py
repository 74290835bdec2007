"""Translate data sets, and the rewards of GRPO and RLOO."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.recipes.translation.rules import Changed, Ignored, apply
from launch.recipes.translation.translator import Translator

ENVIRONMENT = "reward"
OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""The arguments that TRL's command line passes to get_soft_overlong_punishment."""
FUNCTIONS = {  # TRL's names of rewards -> our kind, or the function
    "accuracy_reward": "math",
    "accuracy": "math",  # of Open R1
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
}
SHAPING = "get_soft_overlong_punishment"
RULES = (
    Changed("dataset_kwargs", (None,), "has no effect; data.train of Hetstep has keys of a data set"),
    Ignored("dataset_num_proc dataset_streaming dataset_seed eval_packing"),
)


def translate(t: Translator, trainer: str, algorithm: str, ours: Mapping[str, Any]) -> None:
    """Translate data and rewards. ours: our keys on the command line."""
    environment = _environment(t, ours) if algorithm == "grpo" else None
    _training(t, trainer, environment)
    if t.get("eval_strategy") not in ("no", False, None) and not t.get("datasets"):
        _validation(t, environment)
    for name in ("dataset_test_split", "test_split_size", "dataset_name", "dataset_config", "dataset_train_split"):
        t.consume(name)
    if "shuffle_dataset" in t.theirs:
        t.consume("shuffle_dataset")
    t.put(
        "data.shuffle", t.get("train_sampling_strategy") == "random" if algorithm != "grpo" else t.on("shuffle_dataset"), "seed"
    )
    if (kwargs := t.consume("chat_template_kwargs")) is not None:
        t.put("policy.tokenizer.chat_template_kwargs", kwargs, "chat_template_kwargs")
    if (text := t.consume("system_prompt")) and not any(key.endswith("system_prompt_file") for key in ours):
        instead = "data.train.system_prompt_file=FILE, a file with this text"
        t.lacks("system_prompt", text, "a system prompt in the recipe", instead)
    apply(t, RULES)


# ---- data sets -------------------------------------------------------------------------------------------------------------


def _source(name: str) -> tuple[str, str]:
    """Return (our key of a data set, its value) for a name of the Hub, a folder or a file."""
    path = os.path.expanduser(name)
    return (
        ("data_path", path)
        if re.search(r"\.(jsonl?|parquet|csv|arrow)$", path) or Path(path).is_file()
        else ("dataset_name", path)
    )


def _training(t: Translator, trainer: str, environment: str | None) -> None:
    entries: Any = t.consume("datasets") or (t.consume("dataset_mixture") or {}).get("datasets")
    if entries:
        _mixture(t, entries, environment)
        return
    name = t.get("dataset_name")
    if not isinstance(name, str):
        t.problem("dataset_name", "missing-value", f"got {name}; expected a data set. Try --dataset_name NAME, or datasets")
        return
    key, value = _source(name)
    t.put(f"data.train.{key}", value, "dataset_name")
    if key == "dataset_name":
        t.put("data.train.split", t.get("dataset_train_split"), "dataset_train_split")
        if (subset := t.get("dataset_config")) is not None:
            t.put("data.train.subset", subset, "dataset_config")
    if (size := t.get("test_split_size")) is not None:
        t.put("data.train.split_validation_size", size, "test_split_size")
    if environment:
        t.put("data.train.env_name", environment, "reward_funcs")
    if (column := t.consume("dataset_prompt_column")) is not None:  # of Open R1
        t.put("data.train.input_key", column, "dataset_prompt_column")
    if trainer == "sft" and t.origins.get("dataset_text_field"):
        t.put("data.train.text_key", t.get("dataset_text_field"), "dataset_text_field")
    t.consume("dataset_text_field")


def _validation(t: Translator, environment: str | None) -> None:
    name = t.get("dataset_name")
    if not isinstance(name, str) or t.get("test_split_size") is not None:
        return
    key, value = _source(name)
    if key == "data_path":
        text = f"got {t.get('eval_strategy')}, but {name} is one file without a split {t.get('dataset_test_split')}"
        t.problem("eval_strategy", "missing-value", f"{text}. Try data.validation.data_path=FILE, or --eval_strategy no")
        return
    t.put("data.validation.dataset_name", value, "dataset_name")
    t.put("data.validation.split", t.get("dataset_test_split"), "dataset_test_split")
    if (subset := t.get("dataset_config")) is not None:
        t.put("data.validation.subset", subset, "dataset_config")
    if environment:
        t.put("data.validation.env_name", environment, "reward_funcs")


def _mixture(t: Translator, entries: list[dict[str, Any]], environment: str | None) -> None:
    """Translate a mixture: TRL concatenates its data sets; here each is drawn in proportion to its records, or its fraction."""
    t.put("data.train", None, "datasets")
    names: list[str] = []
    for number, entry in enumerate(entries):
        path = str(entry.get("path", entry.get("id")))
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", path.rpartition("/")[2]).lstrip("_-") or "data"
        names.append(name if name not in names else f"{name}_{number}")
        ours = f"data.datasets.{names[-1]}"
        key, value = _source(path)
        t.put(f"{ours}.{key}", value, "datasets")
        values = {"subset": entry.get("name", entry.get("config")), "split": entry.get("split", "train")}
        values |= {"weight": entry.get("fraction", entry.get("weight")), "env_name": environment}
        files = {name: entry[name] for name in ("data_dir", "data_files") if entry.get(name) is not None}
        values |= {"kwargs": files or None, "split_validation_size": t.get("test_split_size")}
        for column, given in values.items():
            if given is not None and not (key == "data_path" and column in ("subset", "split")):
                t.put(f"{ours}.{column}", given, "datasets")
        if values["weight"] is not None:
            text = f"{path} is drawn with this weight and repeats where it ends; TRL leaves records out instead"
            t.change(f"datasets[{number}].fraction", text)


# ---- rewards ---------------------------------------------------------------------------------------------------------------


def _environment(t: Translator, ours: Mapping[str, Any]) -> str | None:
    """Translate the rewards. Return the name of their environment."""
    functions: Any = t.consume("reward_funcs") or []
    functions = [functions] if isinstance(functions, str) else list(functions)
    given = t.consume("reward_weights")
    model = t.consume("reward_model_name_or_path")
    named = next((key.split(".")[1] for key in ours if key.startswith("env.")), None)
    if named:
        if functions or model:
            t.change("reward_funcs", f"env.{named} on the command line takes its place")
        return named
    equal = [1.0] * (len(functions) + bool(model))
    weights = given if isinstance(given, list) else [given] if given is not None else equal
    if len(weights) != len(equal):
        text = f"got {len(weights)} weights; expected one for each of the {len(equal)} rewards"
        t.problem("reward_weights", "contradiction", text)
        weights = equal
    if model:  # which comes first
        if functions:
            t.lacks("reward_funcs", functions, "functions beside a reward model", "one of the two")
        t.put(f"env.{ENVIRONMENT}.kind", "reward_model", "reward_model_name_or_path")
        t.put(f"env.{ENVIRONMENT}.model_name", model, "reward_model_name_or_path")
        return ENVIRONMENT
    rewards = [(function, float(weight)) for function, weight in zip(functions, weights, strict=True)]
    _shape(t, [weight for function, weight in rewards if function == SHAPING])
    scored = [(_function(t, function), weight) for function, weight in rewards if function != SHAPING]
    if not scored:
        text = "got no function that scores answers; expected one"
        t.problem("reward_funcs", "missing-value", f"{text}. Try --reward_funcs my_module.reward, or env.reward.kind=math")
    elif len(scored) == 1 and scored[0][1] == 1.0:
        t.put(f"env.{ENVIRONMENT}.kind", scored[0][0], "reward_funcs")
    else:
        t.put(f"env.{ENVIRONMENT}.rewards", [{"fn": fn, "weight": weight} for fn, weight in scored], "reward_funcs")
    return ENVIRONMENT


def _function(t: Translator, name: str) -> str:
    """Return our kind, or the dotted path, of a reward. Adds notes and problems."""
    if name in FUNCTIONS:
        if FUNCTIONS[name] == "math":
            text = (
                "math-verify compares the answers, as in TRL; an expected answer that it cannot read is an error, not left out"
            )
            t.change(f"reward_funcs: {name}", f"kind math: {text}")
        else:
            t.change(f"reward_funcs: {name}", f"{FUNCTIONS[name]} is called, so that the generate image needs TRL")
        return FUNCTIONS[name]
    if "/" in name and ".py" not in name:
        t.lacks(
            "reward_funcs", name, "a reward model among the functions", "env.NAME.kind=reward_model with env.NAME.model_name"
        )
    elif "." not in name:
        known = ", ".join(name for name in FUNCTIONS if "_" in name)
        t.problem(
            "reward_funcs", "not-a-choice", f"got {name}; expected a dotted path such as my_module.reward, or one of: {known}"
        )
    return name


def _shape(t: Translator, weights: list[float]) -> None:
    """Translate TRL's punishment of long answers, DAPO's."""
    if not weights:
        return
    ours = "grpo.reward_shaping"
    t.put(f"{ours}.enabled", True, "reward_funcs")
    t.put(f"{ours}.max_response_length", OVERLONG["max_completion_len"], "reward_funcs")
    t.put(f"{ours}.overlong_buffer_length", OVERLONG["soft_punish_cache"], "reward_funcs")
    t.put(f"{ours}.overlong_buffer_penalty", sum(weights), "reward_funcs")
    if t.get("max_completion_length") > OVERLONG["max_completion_len"]:
        text = f"the penalty grows on beyond {OVERLONG['max_completion_len']} tokens; TRL's stays at its weight"
        t.change(f"reward_funcs: {SHAPING}", text)

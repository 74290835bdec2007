"""Translate `data` and the rewards: Parquet files of prompts, and the environment that scores their answers.

verl scores an answer by the column data_source of its record (verl/utils/reward_score/__init__.py). Here each data set has one
environment. So each file becomes a data set. Its environment follows from the file's data_source, or from its path if the file
is not on this machine.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.recipes.translation import record_counts
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import generative_judge

ANSWER = "reward_model.ground_truth"
MOST_NAMES = 5  # values of data_source that a message lists


@dataclass(frozen=True)
class SourceScore:
    """A score of verl, as an environment here."""

    name: str  # of the environment
    environment: Mapping[str, Any]
    note: str
    wrong: float = 0.0  # the reward of a wrong answer; 1 is that of a right one
    sources: tuple[str, ...] = field(default_factory=tuple)


VERLS_OWN = "kind=verl.utils.reward_score.default_compute_score has verl's own score, where verl is installed"
SCORES = (
    SourceScore(
        "gsm8k",
        {"kind": "gsm8k"},
        "the last number of an answer counts, as verl's flexible score; its default, strict, reads only a number after ####;"
        f" env.gsm8k.{VERLS_OWN}",
        sources=("openai/gsm8k",),
    ),
    SourceScore(
        "math",
        {"kind": "math"},
        f"math-verify compares the answers; verl compares the normalized text of the last box; env.math.{VERLS_OWN}",
        sources=("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    ),
    SourceScore(
        "dapo_math",
        {"kind": "math", "kwargs": {"math_verify_impl": "dapo_math_verify"}},
        "DAPO's rules compare the answers, as verl's math_dapo",
        wrong=-1.0,
        sources=("math_dapo", "math", "math_dapo_reasoning", "aime*"),
    ),
)
PATHS = (  # a pattern of a file's path, for a file that is not here -> the score
    (r"gsm8k", "gsm8k"),
    (r"dapo|aime", "dapo_math"),
    (r"\bmath", "math"),
)
RULES = (
    Done("data.train_files data.val_files data.prompt_key data.shuffle data.seed data.filter_overlong_prompts data.truncation"),
    Done("data.train_max_samples data.val_max_samples data.max_prompt_length data.max_response_length"),
    Done("reward.custom_reward_function.path reward.custom_reward_function.name"),
    Done("custom_reward_function.path custom_reward_function.name reward.reward_manager.name reward_model.reward_manager"),
    Only("data.custom_cls.path", (None,), "a data set class of verl", "null"),
    Only("data.sampler.class_path data.datagen.path", (None,), "a sampler of records", "null"),
    Only("data.tool_config_path data.function_tool_path", (None,), "tools of verl", "null"),
    Only("data.return_full_prompt", (False, None), "prompts in the records of rewards", "false"),
    Ignored("data.image_key data.video_key data.audio_key data.image_patch_size data.return_multi_modal_inputs data.mm_*"),
    Ignored("data.reward_fn_key", "each data set has one environment"),
    Ignored(
        "data.tokenizer data.use_shm data.return_raw_* data.dataloader_num_workers data.validation_shuffle data.custom_cls.*"
    ),
    Ignored("data.filter_overlong_prompts_workers data.trust_remote_code data.val_batch_size data.sampler.* data.datagen.*"),
    Ignored("data.apply_chat_template_kwargs _target_"),
    Only("sandbox_fusion.url reward.sandbox_fusion.url", (None,), "a sandbox service", "null: kind=code has a sandbox"),
    Only("reward.reward_manager.source", ("register", None), "a reward manager of the user", "register"),
    Ignored("reward.reward_manager.* sandbox_fusion.* reward.sandbox_fusion.* reward.num_workers reward._target_"),
    Only("reward_model.reward_loop_*", (None,), "a reward manager of the user", "null"),
    Changed("reward.reward_kwargs.* reward_model.reward_kwargs.*", (None,), "is not passed to the score"),
)
MANAGERS = ("naive", "dapo", "batch", "limited", "rate_limited")


def translate(t: Translator, algorithm: str, has_environment: bool) -> None:
    """Translate data sets and rewards. has_environment: whether the command line has keys of `env`."""
    _prompts(t)
    shaping(t, algorithm)
    custom = _custom_score(t)
    generative_judge.translate(t, custom is not None)
    scores: list[SourceScore | None] = []
    for split, files_key, samples_key in (
        ("train", "data.train_files", "data.train_max_samples"),
        ("validation", "data.val_files", "data.val_max_samples"),
    ):
        files = _files(t.consume(files_key))
        if split == "validation" and not files:
            continue
        scores += _data_sets(t, split, files_key, files, custom, t.consume(samples_key))
    if None in scores and not has_environment:
        _refuse_unknown(t)
    wrong = {score.wrong for score in scores if score}
    if -1.0 in wrong and custom is None:
        if len(wrong) > 1 or None in scores:
            t.change("data.train_files", "a wrong answer has the reward 0 in every data set; in verl -1 where math_dapo scores")
        else:
            scaling = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": -1.0, "target_max": 1.0}
            t.put(f"{algorithm}.reward_scaling", scaling, "data.train_files")
    apply(t, RULES)


def _prompts(t: Translator) -> None:
    t.put("data.shuffle", t.consume("data.shuffle"), "data.shuffle")
    drops, truncation = t.consume("data.filter_overlong_prompts"), t.consume("data.truncation")
    t.put("data.overlong_prompts", "drop" if drops else "error", "data.filter_overlong_prompts")
    if truncation != "error" and not drops:
        t.put("data.overlong_prompts", "drop", "data.truncation")
        t.change(f"data.truncation={truncation}", "longer prompts are left out; verl cuts them")
    kwargs = t.consume("data.apply_chat_template_kwargs")
    if kwargs:
        t.put("policy.tokenizer.chat_template_kwargs", kwargs, "data.apply_chat_template_kwargs")


def _files(value: Any) -> list[str]:
    return [os.path.expanduser(str(path)) for path in (value if isinstance(value, list) else [value]) if path]


def _data_sets(
    t: Translator, split: str, key: str, files: list[str], custom: SourceScore | None, most: Any
) -> list[SourceScore | None]:
    """Translate the files of a split, and return their scores."""
    names = _names(files)
    one, several = ("data.train", "data.datasets") if split == "train" else ("data.validation", "data.validations")
    found: list[SourceScore | None] = []
    if len(files) > 1 and split == "train":
        t.put("data.train", None, key)
    for path, name in zip(files, names, strict=True):
        score = custom or _score(t, key, path)
        found.append(score)
        environment = score.name if score else "reward"
        ours = one if len(files) == 1 else f"{several}.{name}"
        values = {"data_path": path, "input_key": t.get("data.prompt_key"), "output_key": ANSWER, "env_name": environment}
        for column, value in values.items():
            t.put(f"{ours}.{column}", value, key)
        if isinstance(most, int) and most > 0:
            samples_key = f"data.{'train' if split == 'train' else 'val'}_max_samples"
            t.put(f"{ours}.max_samples", most, samples_key)
            if len(files) > 1 and name == names[0]:
                t.change(samples_key, f"{most} records of each file; in verl of all files together")
    t.consume("data.prompt_key")
    return found


def _names(files: list[str]) -> list[str]:
    """Return a name for each file's data set: its folder's, or its own where files share a folder."""
    folders = [re.sub(r"\W+", "_", Path(path).parent.name) or "data" for path in files]
    counts = Counter(folders)
    names = [
        folder if counts[folder] == 1 else re.sub(r"\W+", "_", Path(path).stem)
        for folder, path in zip(folders, files, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names)]


# ---- scores ----------------------------------------------------------------------------------------------------------------


def _custom_score(t: Translator) -> SourceScore | None:
    """Translate the user's own function, whose file's folder is among those of the user's modules."""
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        path = t.get(f"{key}.path")
        if not path:
            continue
        file = Path(os.path.expanduser(str(path)))
        if file.suffix != ".py" or not file.stem.isidentifier():
            t.lacks(
                f"{key}.path", path, "a score that is not in a file NAME.py", "a file whose name is that of a Python module"
            )
            return None
        name = f"{file.stem}.{t.get(f'{key}.name') or 'compute_score'}"
        t.put("env.reward.kind", name, f"{key}.path")
        if isinstance(arguments := t.consume(f"{key}.reward_kwargs"), dict) and arguments:
            t.put("env.reward.kwargs", arguments, f"{key}.reward_kwargs")
        t.put("module_folders", [str(file.parent)], f"{key}.path")
        return SourceScore("reward", {"kind": name}, "")
    manager_key = next((key for key in ("reward_model.reward_manager", "reward.reward_manager.name") if t.get(key)), "")
    manager = t.get(manager_key) if manager_key else "naive"
    if manager not in MANAGERS:
        t.lacks(manager_key, manager, "this reward manager", f"one of: {', '.join(MANAGERS)}")
    return None


def _score(t: Translator, key: str, path: str) -> SourceScore | None:
    """Return the score of a file's answers, and put its environment. Return None if it is not known."""
    sources = data_sources(Path(path))
    if sources is None:
        matches = [name for pattern, name in PATHS if re.search(pattern, path, re.IGNORECASE)]
        scores = {one.name: one for one in SCORES}
        score = scores[matches[0]] if matches else None
        why = f"{path} is not on this machine, so its path tells the score"
    else:
        found = [score_of(source) for source in sources]
        score = found[0] if found and all(one == found[0] for one in found) else None
        why = f"data_source is {', '.join(sorted(sources)[:MOST_NAMES])}"
    if score is not None and t.get_layer(f"env.{score.name}") is None:
        t.put(f"env.{score.name}", dict(score.environment), key)
        t.change(key, f"env.{score.name}: {score.note}; {why}")
    return score


def _refuse_unknown(t: Translator) -> None:
    """Add a problem for files whose score is not known, or for pictures, whose key a configuration then names."""
    t.put("env.reward.kind", "exact_match", "data.train_files")  # for the checks of the other keys
    for key in ("data.image_key", "data.video_key", "data.audio_key"):
        if t.origins.get(key):
            t.lacks(key, t.get(key), "images, sound or video")
            return
    files = [*_files(t.get("data.train_files")), *_files(t.get("data.val_files"))]
    unknown = [path for path in files if _score(t, "data.train_files", path) is None]
    sources = sorted(set().union(*(data_sources(Path(path)) or () for path in unknown)))
    got = f"data_source {', '.join(sources[:MOST_NAMES])}" if sources else "files that are not here, whose paths name no score"
    known = ", ".join(source for score in SCORES for source in score.sources)
    message = (
        f"got {', '.join(unknown)} with {got}; expected one score in each file, for a data_source of: {known}. Try"
        " reward.custom_reward_function.path=FILE.py, or env.reward.kind=math or another kind, on the command line"
    )
    t.problem("data.train_files", "missing-value", message)


def score_of(source: str) -> SourceScore | None:
    """Return the score of a value of the column data_source; None if Hetstep has none of the same kind."""
    for score in SCORES:
        for known in score.sources:
            if source == known or (known.endswith("*") and source.startswith(known[:-1])):
                return score
    return None


def data_sources(path: Path) -> set[str] | None:
    """Return the values of the column data_source of a Parquet file; None if it cannot be read here."""
    if not path.is_file():
        return None
    try:
        import pyarrow.parquet  # takes 0.2 s

        column = pyarrow.parquet.read_table(path, columns=["data_source"]).column(0)
        return {str(value) for value in column.unique().to_pylist()}
    except (ImportError, OSError, ValueError, KeyError, IndexError):  # which the check of the data reports
        return None


def count_records(files: Any) -> int | None:
    """Return the number of records in Parquet files; None if some cannot be read here."""
    counts = [record_counts.count(path, None, "train") for path in _files(files)]
    return None if None in counts else sum(filter(None, counts))


# ---- shaping ---------------------------------------------------------------------------------------------------------------


def shaping(t: Translator, algorithm: str) -> None:
    """Translate DAPO's penalty on long answers, by its keys in `reward` or `reward_model`."""
    for section in ("reward.reward_kwargs", "reward_model.reward_kwargs", "reward_model"):
        key = f"{section}.overlong_buffer_cfg" if section.endswith("kwargs") else f"{section}.overlong_buffer"
        values = t.consume(key)
        longest = t.consume(f"{section}.max_resp_len") if section.endswith("kwargs") else None
        if not isinstance(values, dict) or values.get("enable") is not True:
            continue
        ours = f"{algorithm}.reward_shaping"
        t.put(f"{ours}.enabled", True, f"{key}.enable")
        t.put(f"{ours}.overlong_buffer_length", values.get("len"), f"{key}.len")
        t.put(f"{ours}.overlong_buffer_penalty", values.get("penalty_factor", 1.0), f"{key}.penalty_factor")
        most = longest if longest is not None else t.get("data.max_response_length")
        t.put(f"{ours}.max_response_length", most, f"{section}.max_resp_len")

"""The data sets that have names of their own, as NeMo-RL has them, and what a recipe's `data` and `env` say against themselves.

How their records are read is in `pipeline/data/named.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pipeline.config.algorithms import PAIRED
from pipeline.config.schema import GENERATED_DATASETS, DatasetConfig, Recipe


@dataclass(frozen=True)
class NamedDataset:
    repository: str  # on the Hugging Face Hub
    split: str = "train"
    subsets: tuple[str, ...] = ()  # configurations of the repository, laid end to end; none: its default
    conversations: bool = False  # whether its records are messages, else a question and an answer
    answers: bool = True  # whether they have an answer to expect or to learn
    pairs: bool = False  # whether they have a chosen and a rejected one
    output_key: bool = False  # whether the recipe may choose the answer's column


NAMED_DATASETS = {
    "AIME2024": NamedDataset("HuggingFaceH4/aime_2024"),
    "AIME2025": NamedDataset("opencompass/AIME2025", "test", ("AIME2025-I", "AIME2025-II")),
    "AIME2026": NamedDataset("MathArena/aime_2026"),
    "DAPOMath17K": NamedDataset("BytedTsinghua-SIA/DAPO-Math-17k"),
    "DAPOMathAIME2024": NamedDataset("BytedTsinghua-SIA/AIME-2024"),
    "DeepScaler": NamedDataset("agentica-org/DeepScaleR-Preview-Dataset"),
    "GSM8K": NamedDataset("openai/gsm8k", subsets=("main",)),
    "gsm8k": NamedDataset("openai/gsm8k", subsets=("main",)),
    "HelpSteer3": NamedDataset("nvidia/HelpSteer3", subsets=("preference",), conversations=True, pairs=True),
    "Nemotron-Cascade-2-SFT-Math": NamedDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subsets=("math",), conversations=True),
    "OpenMathInstruct-2": NamedDataset("nvidia/OpenMathInstruct-2", "train_1M", output_key=True),
    "OpenR1-Math-220k": NamedDataset("open-r1/OpenR1-Math-220k", subsets=("default",)),
    "squad": NamedDataset("rajpurkar/squad", conversations=True),
    "tulu3_sft_mixture": NamedDataset("allenai/tulu-3-sft-mixture", conversations=True),
    "Tulu3Preference": NamedDataset(
        "allenai/llama-3.1-tulu-3-8b-preference-mixture", conversations=True, answers=False, pairs=True
    ),
}

DATASET_CARDS = (".gitattributes", ".huggingface.yaml", "README.md")
"""What a repository has besides data: `datasets` leaves it in the hub's cache also of what it keeps elsewhere."""

MATH_VERIFIERS = ("hf_math_verify", "dapo_math_verify")
"""What env.*.kwargs.math_verify_impl of an environment of kind math may be."""

COLUMNS = ("input_key", "output_key", "messages_key", "chosen_key", "rejected_key", "margin_key")


def validates(recipe: Recipe) -> bool:
    """Whether there is something to validate on: data.validation, or what data.train.split_validation_size holds out."""
    return recipe.data.validation is not None or recipe.data.train.split_validation_size > 0


def is_dotted_path(name: str) -> bool:
    """Whether a data set's name is the dotted path of a user's callable: my_package.my_module.MyDataset. A file's is none."""
    parts = name.split(".")
    return (
        len(parts) > 1 and all(part.isidentifier() for part in parts) and parts[-1] not in ("csv", "json", "jsonl", "parquet")
    )


def nearest_dataset(name: str) -> str | None:
    """The data set that a misspelt name may mean."""
    known = {known.lower(): known for known in (*NAMED_DATASETS, *GENERATED_DATASETS)}
    close = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.75)
    return known[close[0]] if close else None


def check_data(recipe: Recipe) -> Iterator[str]:
    """What `data` and `env` say against themselves, before any file is looked for."""
    for name in ("train", "validation"):
        if (dataset := getattr(recipe.data, name)) is not None:
            yield from _check_numbers(f"data.{name}", dataset)
            yield from _check_named(recipe, f"data.{name}", dataset)
    held_out = recipe.data.train.split_validation_size
    if recipe.data.validation is not None and held_out:
        yield (
            f"data.train.split_validation_size: {held_out:g} holds records out to validate on, but data.validation names a"
            " data set for it; 0, or data.validation=null"
        )
    if recipe.data.validation is not None and recipe.data.validation.split_validation_size:
        yield "data.validation.split_validation_size: nothing is held out of what is validated on; leave it at 0"
    for name, environment in recipe.env.items():
        verifier = environment.kwargs.get("math_verify_impl", MATH_VERIFIERS[0])
        if environment.kind == "math" and verifier not in MATH_VERIFIERS:
            yield f"env.{name}.kwargs.math_verify_impl: '{verifier}' is not one of: {', '.join(MATH_VERIFIERS)}"


def _check_numbers(key: str, dataset: DatasetConfig) -> Iterator[str]:
    size = dataset.split_validation_size
    if size < 0 or (size >= 1 and size != int(size)):
        yield f"{key}.split_validation_size: {size:g} is neither a share below 1 nor a number of records; 0.05, or 256"
    if dataset.repeat < 1:
        yield f"{key}.repeat: {dataset.repeat} is too small; at least 1"
    if dataset.max_samples is not None and dataset.max_samples < 1:
        yield f"{key}.max_samples: {dataset.max_samples} is too small; at least 1, or null for all"


def _check_named(recipe: Recipe, key: str, dataset: DatasetConfig) -> Iterator[str]:
    name = dataset.dataset_name
    if name not in NAMED_DATASETS:
        return
    named = NAMED_DATASETS[name]
    default = {field.name: field.default for field in fields(DatasetConfig)}
    for column in COLUMNS:
        if getattr(dataset, column) != default[column] and not (column == "output_key" and named.output_key):
            yield (
                f"{key}.{column}: {name} has columns of its own, so this would mean nothing; leave it out, or read the columns"
                f" you choose with {key}.dataset_name={named.repository}"
            )
    if named.conversations and not recipe.data.apply_chat_template:
        yield f"{key}.dataset_name: {name} has conversations, which need data.apply_chat_template=true"
    paired = recipe.algorithm in PAIRED
    if not (named.pairs if paired else named.answers):
        fit = [other for other, known in NAMED_DATASETS.items() if (known.pairs if paired else known.answers)]
        lacks = "no pairs of answers" if paired else "only pairs of answers"
        yield f"{key}.dataset_name: {name} has {lacks}, which {recipe.algorithm} cannot learn from; one of: {', '.join(fit)}"

"""The data sets that have names of their own, as NeMo-RL has them, and what a recipe's `data` says against itself.

How their records are read is in `pipeline/data/named.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pipeline.config.algorithms import OFFLINE, ONLINE, PAIRED
from pipeline.config.schema import GENERATED_DATASETS, DataConfig, DatasetConfig, Recipe, evaluates_alone, generates


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

NAME = re.compile(r"[A-Za-z0-9][\w-]*")

COLUMNS = ("input_key", "output_key", "messages_key", "text_key", "chosen_key", "rejected_key", "margin_key")


def training_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """What is trained on, by name: data.datasets, or data.train alone."""
    return data.datasets or ({"train": data.train} if data.train is not None else {})


def validation_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """What is validated on besides what is held out of training data, by name."""
    return data.validations or ({"validation": data.validation} if data.validation is not None else {})


def keyed_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """All of them, each by its dotted key in the recipe."""
    trained = {"data.train" if not data.datasets else f"data.datasets.{name}": one for name, one in training_sets(data).items()}
    validated = {
        "data.validation" if not data.validations else f"data.validations.{name}": one
        for name, one in validation_sets(data).items()
    }
    return trained | validated


def held_out_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """The training data sets that hold records out to validate on, by the names under which these are told of."""
    trained = training_sets(data).items()
    return {"held_out" if name == "train" else name: dataset for name, dataset in trained if dataset.split_validation_size > 0}


def validates(recipe: Recipe) -> int:
    """How many data sets are validated on: those for it, and what is held out of others."""
    return len(held_out_sets(recipe.data)) + len(validation_sets(recipe.data))


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
    """What `data` says against itself, and of `env`, before any file is looked for."""
    for key, dataset in keyed_sets(recipe.data).items():
        yield from _check_numbers(key, dataset)
        yield from _check_named(recipe, key, dataset)
        if dataset.text_key and recipe.algorithm != "sft":
            yield f"{key}.text_key: got '{dataset.text_key}'; expected null: {recipe.algorithm} needs prompts. Try input_key"
        if generates(recipe) and dataset.env_name not in recipe.env:
            yield _no_environment(recipe, key, dataset.env_name)
    yield from _check_several(recipe.data)
    if recipe.algorithm in (*ONLINE, *OFFLINE) and evaluates_alone(recipe) and not validates(recipe):
        yield (
            f"{recipe.algorithm}.max_num_steps: got 0, which validates once and learns nothing; expected a data set to validate"
            " on. Try data.validation.data_path=FILE.jsonl"
        )
    if (tokens := recipe.data.max_input_seq_length) > (longest := recipe.policy.max_total_sequence_length):
        yield (
            f"data.max_input_seq_length: {tokens} is above policy.max_total_sequence_length {longest}, and a batch need have"
            " no room for more; at most that"
        )


def _no_environment(recipe: Recipe, key: str, name: str | None) -> str:
    got = "null" if name is None else f"'{name}'"
    needs = f"{recipe.algorithm} samples answers, and an environment judges them"
    if not recipe.env:
        name = name or "math"
        return (
            f"{key}.env_name: got {got}, but {needs}; expected the name of one under env, which has none. Try"
            f" {key}.env_name={name} env.{name}.kind=math (or another kind: exact_match, code, the dotted path of your own ...)"
        )
    known = ", ".join(recipe.env)
    return (
        f"{key}.env_name: got {got}, but {needs}; expected one of env's: {known}. Try {key}.env_name={next(iter(recipe.env))}"
    )


def _check_several(data: DataConfig) -> Iterator[str]:
    """What data sets say against each other."""
    if data.train is None and not data.datasets:
        yield "data.train: null, so that there is nothing to train on; it, or data.datasets, must name a data set"
    if data.datasets and data.train not in (None, DatasetConfig()):
        yield "data.train: data.datasets is there in its place; data.train=null, or leave data.datasets out"
    if data.validations and data.validation is not None:
        yield "data.validation: data.validations is there in its place; data.validation=null, or leave data.validations out"
    for key, dataset in keyed_sets(data).items():
        if not NAME.fullmatch(key.rpartition(".")[2]):
            yield f"{key}: the name becomes a part of metrics' names, so it may have letters, digits, _ and - alone"
        if dataset.weight is not None and not key.startswith("data.datasets."):
            yield f"{key}.weight: only what is in data.datasets is mixed; leave it out"
        if dataset.split_validation_size and key.startswith("data.validation"):
            yield f"{key}.split_validation_size: nothing is held out of what is validated on; leave it at 0"
    weighed = [dataset.weight is not None for dataset in data.datasets.values()]
    if any(weighed) and not all(weighed):
        without = [name for name, dataset in data.datasets.items() if dataset.weight is None]
        yield f"data.datasets.{without[0]}.weight: not given, but others are; a number, or none anywhere, for those of records"
    for name in held_out_sets(data):
        if name in data.validations:
            yield f"data.validations.{name}: what a training data set holds out is validated on under this name; another one"


def _check_numbers(key: str, dataset: DatasetConfig) -> Iterator[str]:
    size = dataset.split_validation_size
    if size >= 1 and size != int(size):
        yield f"{key}.split_validation_size: {size:g} is neither a share below 1 nor a number of records; 0.05, or 256"


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

"""Registry of data sets, and the checks of `data`.

A generated data set is a callable (split, seed=, **kwargs) that returns a sequence of records; your own data sets may be such
callables too. Named data sets are NeMo-RL's, on the Hugging Face Hub; `pipeline/data/named.py` reads their records. A new data
set of either sort is one line here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pipeline.algorithms import ALGORITHMS, LABELED, ONLINE, PAIRED
from pipeline.algorithms.evaluate import TaskDataConfig
from pipeline.config.environments import agents
from pipeline.config.schema import CurriculumConfig, DataConfig, DatasetConfig, Recipe, generates, only_evaluates
from pipeline.recipe.problems import Problem

GENERATED_DATASETS = {
    "calculator_multiplication": "pipeline.data.arithmetic.products",
    "scratchpad_addition": "pipeline.data.scratchpad.addition",
    "scratchpad_preferences": "pipeline.data.scratchpad.preferences",
    "terminal_tasks": "pipeline.data.terminal.tasks",
    "word_problems": "pipeline.data.word_problems.problems",
    "word_problem_preferences": "pipeline.data.word_problems.preferences",
    "sliding_puzzle": "pipeline.data.puzzle.Puzzles",
}


@dataclass(frozen=True)
class NamedDataset:
    """A data set of the Hugging Face Hub that recipes select by name."""

    repository: str  # on the Hugging Face Hub
    split: str = "train"
    subsets: tuple[str, ...] = ()  # configurations of the repository, concatenated; none: its default
    form: str = "answered"  # format of its records: see READERS in pipeline/data/named.py
    question: str = "problem"  # column, for form answered
    answer: str = "answer"  # column, for form answered
    conversations: bool = False  # whether records are messages; otherwise a question and an answer
    answers: bool = True  # whether records have an answer
    pairs: bool = False  # whether records have a chosen and a rejected answer
    output_key: bool = False  # whether the recipe may choose the answer's column


GSM8K = NamedDataset("openai/gsm8k", subsets=("main",), form="gsm8k")
NAMED_DATASETS = {
    "AIME2024": NamedDataset("HuggingFaceH4/aime_2024"),
    "AIME2025": NamedDataset("opencompass/AIME2025", "test", ("AIME2025-I", "AIME2025-II"), question="question"),
    "AIME2026": NamedDataset("MathArena/aime_2026"),
    "DAPOMath17K": NamedDataset("BytedTsinghua-SIA/DAPO-Math-17k", form="dapo"),
    "DAPOMathAIME2024": NamedDataset("BytedTsinghua-SIA/AIME-2024", form="dapo"),
    "DeepScaler": NamedDataset("agentica-org/DeepScaleR-Preview-Dataset"),
    "GSM8K": GSM8K,
    "gsm8k": GSM8K,
    "HelpSteer3": NamedDataset("nvidia/HelpSteer3", "train", ("preference",), "helpsteer3", conversations=True, pairs=True),
    "Nemotron-Cascade-2-SFT-Math": NamedDataset(
        "nvidia/Nemotron-Cascade-2-SFT-Data", "train", ("math",), "conversation", conversations=True
    ),
    "OpenMathInstruct-2": NamedDataset("nvidia/OpenMathInstruct-2", "train_1M", answer="expected_answer", output_key=True),
    "OpenR1-Math-220k": NamedDataset("open-r1/OpenR1-Math-220k", subsets=("default",)),
    "squad": NamedDataset("rajpurkar/squad", form="squad", conversations=True),
    "tulu3_sft_mixture": NamedDataset("allenai/tulu-3-sft-mixture", form="conversation", conversations=True),
    "Tulu3Preference": NamedDataset(
        "allenai/llama-3.1-tulu-3-8b-preference-mixture", form="tulu3_preference", conversations=True, answers=False, pairs=True
    ),
}

DATASET_CARDS = (".gitattributes", ".huggingface.yaml", "README.md")
"""Files of a repository that are not data. `datasets` leaves them in the hub's cache even if it stores the data elsewhere."""

NAME = re.compile(r"[A-Za-z0-9][\w-]*")

COLUMNS = ("input_key", "output_key", "messages_key", "text_key", "chosen_key", "rejected_key", "label_key", "margin_key")


def training_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """Return name -> training data set: data.datasets, or data.train alone."""
    return data.datasets or ({"train": data.train} if data.train is not None else {})


def validation_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """Return name -> validation data set. Data sets held out of training data are not among them."""
    return data.validations or ({"validation": data.validation} if data.validation is not None else {})


def keyed_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """Return dotted key in the recipe -> data set, for all data sets."""
    trained = {"data.train" if not data.datasets else f"data.datasets.{name}": one for name, one in training_sets(data).items()}
    validated = {
        "data.validation" if not data.validations else f"data.validations.{name}": one
        for name, one in validation_sets(data).items()
    }
    return trained | validated


def data_paths(dataset: DatasetConfig | TaskDataConfig) -> list[str]:
    """Return the paths and globs of a data set's data_path; none if it has no data_path."""
    paths = dataset.data_path
    return [] if paths is None else [paths] if isinstance(paths, str) else list(paths)


def held_out_sets(data: DataConfig) -> dict[str, DatasetConfig]:
    """Return name in validation -> training data set, for the training data sets that hold out records for validation."""
    trained = training_sets(data).items()
    return {"held_out" if name == "train" else name: dataset for name, dataset in trained if dataset.split_validation_size > 0}


def validates(recipe: Recipe) -> int:
    """Return the number of validation data sets, including those held out of training data."""
    return len(held_out_sets(recipe.data)) + len(validation_sets(recipe.data))


def is_dotted_path(name: str) -> bool:
    """Return whether a data set's name is the dotted path of user code, such as my_module.MyDataset, not a file name."""
    parts = name.split(".")
    return (
        len(parts) > 1 and all(part.isidentifier() for part in parts) and parts[-1] not in ("csv", "json", "jsonl", "parquet")
    )


def nearest_dataset(name: str) -> str | None:
    """Return the data set whose name is most similar to a misspelled one; None if none is similar."""
    known = {known.lower(): known for known in (*NAMED_DATASETS, *GENERATED_DATASETS)}
    close = difflib.get_close_matches(name.lower(), known, 1, cutoff=0.75)
    return known[close[0]] if close else None


def check_data(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `data`, alone and in combination with `env`, before any file is read."""
    data = recipe.data
    for name in agents(recipe.env) if not data.apply_chat_template else ():
        message = "got an agent with data.apply_chat_template=false; expected true, since agents send messages"
        yield Problem(f"env.{name}.kind", "contradiction", message)
    for key, dataset in keyed_sets(data).items():
        yield from _check_numbers(key, dataset)
        yield from _check_named(recipe, key, dataset)
        if dataset.data_path == []:
            yield Problem(
                f"{key}.data_path", "missing-value", "got an empty list; expected at least one path. Try [FILE, FILE]"
            )
        if dataset.text_key and recipe.algorithm in (*ONLINE, *PAIRED, *LABELED):
            text = f"got '{dataset.text_key}'; expected null: {recipe.algorithm} needs prompts. Try input_key"
            yield Problem(f"{key}.text_key", "unsupported", text)
        if dataset.margin_key and recipe.algorithm != "rm":
            text = f"got '{dataset.margin_key}'; expected null: {recipe.algorithm} does not use margins, only rm does"
            yield Problem(f"{key}.margin_key", "unsupported", text)
        if dataset.label_key != DatasetConfig.label_key and recipe.algorithm not in LABELED:
            text = f"got {dataset.label_key}; expected 'label', the default: only kto uses labels of answers"
            yield Problem(f"{key}.label_key", "unsupported", text)
        if recipe.algorithm in PAIRED:
            yield from _check_pairs(recipe, key, dataset)
        if generates(recipe) and dataset.env_name not in recipe.env:
            yield _no_environment(recipe, f"{key}.env_name", dataset.env_name)
    yield from _check_several(data)
    curriculum, key = data.curriculum, "data.curriculum"
    processed = next((name for name, dataset in training_sets(data).items() if dataset.processor), None)
    if curriculum.enabled and processed is not None:
        prefix = f"data.datasets.{processed}" if data.datasets else "data.train"
        text = f"got true with {prefix}.processor, which may make several prompts of a record; expected one of the two"
        yield Problem(f"{key}.enabled", "contradiction", text)
    if curriculum != CurriculumConfig() and not curriculum.enabled:
        text = f"got false, so that the other keys of {key} have no effect. Try {key}.enabled=true"
        yield Problem(f"{key}.enabled", "has-no-effect", text)
    if curriculum.enabled and curriculum.hard >= curriculum.easy:
        text = f"got {curriculum.hard}; expected below {key}.easy, {curriculum.easy}"
        yield Problem(f"{key}.hard", "too-large", text)
    if curriculum.enabled and curriculum.easy_share + curriculum.hard_share > 1:
        text = f"got {curriculum.hard_share} with {key}.easy_share={curriculum.easy_share}; expected at most 1 together"
        yield Problem(f"{key}.hard_share", "too-large", text)
    if recipe.algorithm in ALGORITHMS and only_evaluates(recipe) and not validates(recipe):
        yield Problem(
            f"{recipe.algorithm}.max_num_steps",
            "missing-value",
            "got 0, which only validates; expected a validation data set. Try data.validation.data_path=FILE.jsonl",
        )
    if (tokens := data.max_input_seq_length) > (longest := recipe.policy.max_total_sequence_length):
        text = f"got {tokens} tokens; expected at most policy.max_total_sequence_length, {longest} tokens"
        yield Problem("data.max_input_seq_length", "too-large", text)


def _check_pairs(recipe: Recipe, key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    if dataset.chosen_key == dataset.rejected_key:
        text = f"got '{dataset.rejected_key}', which is also {key}.chosen_key; expected another column"
        yield Problem(f"{key}.rejected_key", "contradiction", text)
    if dataset.dataset_name == "scratchpad_addition":
        text = f"got scratchpad_addition; expected pairs of answers for {recipe.algorithm}. Try scratchpad_preferences"
        yield Problem(f"{key}.dataset_name", "unsupported", text)


def _no_environment(recipe: Recipe, key: str, name: str | None) -> Problem:
    got = "null" if name is None else f"'{name}'"
    why = f"got {got}, but an environment must score the answers that {recipe.algorithm} samples; expected"
    if not recipe.env:
        name = name or "math"
        text = (
            f"{why} a key of env, which is empty. Try {key}={name} env.{name}.kind=math, or another kind such as exact_match,"
            " code or the dotted path of your own class"
        )
    else:
        text = f"{why} a key of env: {', '.join(recipe.env)}. Try {key}={next(iter(recipe.env))}"
    return Problem(key, "missing-value" if got == "null" else "not-a-choice", text)


def _check_several(data: DataConfig) -> Iterator[Problem]:
    """Yield the problems of data sets in combination."""
    if data.train is None and not data.datasets:
        text = "got null, which leaves nothing to train on; expected a data set here or in data.datasets"
        yield Problem("data.train", "missing-value", text)
    for single, default, several in (("train", DatasetConfig(), "datasets"), ("validation", None, "validations")):
        if getattr(data, several) and getattr(data, single) not in (None, default):
            text = f"got a data set, but data.{several} replaces it. Try data.{single}=null, or leave data.{several} out"
            yield Problem(f"data.{single}", "contradiction", text)
    for key, dataset in keyed_sets(data).items():
        if not NAME.fullmatch(key.rpartition(".")[2]):
            text = "expected a name of only letters, digits, _ and -, since the names of metrics contain it"
            yield Problem(key, "bad-format", text)
        if dataset.weight is not None and not key.startswith("data.datasets."):
            yield Problem(f"{key}.weight", "has-no-effect", "only data sets in data.datasets have a weight. Leave it out")
        if dataset.split_validation_size and key.startswith("data.validation"):
            text = "only training data sets hold records out for validation. Leave it at 0"
            yield Problem(f"{key}.split_validation_size", "has-no-effect", text)
    without = [name for name, dataset in data.datasets.items() if dataset.weight is None]
    if 0 < len(without) < len(data.datasets):
        text = "got null, but other data sets have a weight. Try a number, or leave out all weights to use numbers of records"
        yield Problem(f"data.datasets.{without[0]}.weight", "missing-value", text)
    for name in held_out_sets(data):
        if name in data.validations:
            text = "the records held out of a training data set already have this name in validation. Try another name"
            yield Problem(f"data.validations.{name}", "ambiguous", text)


def _check_numbers(key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    size = dataset.split_validation_size
    if size >= 1 and size != int(size):
        text = f"got {size:g}; expected a share below 1, or a number of records. Try 0.05, or 256"
        yield Problem(f"{key}.split_validation_size", "bad-format", text)


def _check_named(recipe: Recipe, key: str, dataset: DatasetConfig) -> Iterator[Problem]:
    name = dataset.dataset_name
    if name not in NAMED_DATASETS:
        return
    named = NAMED_DATASETS[name]
    default = {field.name: field.default for field in fields(DatasetConfig)}
    for column in COLUMNS:
        if getattr(dataset, column) != default[column] and not (column == "output_key" and named.output_key):
            text = f"{name} has fixed columns. Leave it out, or choose columns with {key}.dataset_name={named.repository}"
            yield Problem(f"{key}.{column}", "has-no-effect", text)
    if named.conversations and not recipe.data.apply_chat_template:
        text = f"{name} has conversations, which need data.apply_chat_template=true"
        yield Problem(f"{key}.dataset_name", "contradiction", text)
    paired = recipe.algorithm in (*PAIRED, *LABELED)  # no named data set has labels
    if not (named.pairs if paired else named.answers):
        fit = [other for other, known in NAMED_DATASETS.items() if (known.pairs if paired else known.answers)]
        lacks = "no pairs of answers" if paired else "only pairs of answers"
        text = f"{name} has {lacks}, so {recipe.algorithm} cannot learn from it; expected one of: {', '.join(fit)}"
        yield Problem(f"{key}.dataset_name", "unsupported", text)

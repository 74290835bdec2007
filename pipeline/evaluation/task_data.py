"""Read a task's data: its questions, and the worked examples of each question.

Nothing here imports torch, and `datasets` is imported only to read a data set with it. So the checks before submission can use
this file.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipeline.algorithms.evaluate import FORMATS, HARNESS_KINDS, HARNESS_RECORDS, TaskConfig, TaskDataConfig
from pipeline.config import DatasetConfig
from pipeline.config.schema_validation import validate_mapping
from pipeline.data import sources
from pipeline.data.datasets import load_records, record_location, with_key
from pipeline.data.file_formats import suffix_format
from pipeline.data.records import value_of
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError

logger = logging.getLogger(__name__)

HARNESS_FORMAT = "pipeline.evaluation.formats.user_records.HarnessRecords"
ID_DIGITS = 8  # of the hash of a record's content
SHOWN = 20  # dropped questions that the log names, and files that a message does


@dataclass
class DroppedQuestions:
    """Counts the questions that a task drops."""

    drops: bool = False  # whether the task drops bad questions
    count: int = 0
    first: RecipeError | None = None

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the question that the block reads or renders, if the block raises a RecipeError of only bad-record problems."""
        try:
            yield
        except RecipeError as error:
            if not self.drops or any(problem.code != "bad-record" for problem in error.problems):
                raise
            self.count += 1
            self.first = self.first or error
            if self.count <= SHOWN:
                logger.warning("bad_records=drop: questions dropped so far: %d, the last one: %s", self.count, error)

    def check(self, remaining: int) -> None:
        """Raise RecipeError if questions were dropped and none remains. remaining: the number of questions left."""
        if self.first is not None and not remaining:
            (problem, *_) = self.first.problems
            message = f"none of {self.count} records can be asked. The first problem: {problem.message}"
            raise RecipeError(Problem(problem.key, "bad-record", message)) from self.first

    @property
    def warnings(self) -> list[str]:
        """The warning for scores.json, as a list of one text; empty if no question was dropped."""
        if self.first is None:
            return []
        records = "record" if self.count == 1 else "records"
        return [f"dropped {self.count} bad {records} (data.bad_records=drop); no score counts them. The first: {self.first}"]


@dataclass(frozen=True)
class TaskData:
    """The questions of a task that max_samples selects, in the order of its data, with their worked examples."""

    questions: tuple[Question, ...]
    examples: Mapping[str, tuple[Question, ...]]
    """Question id -> the worked examples that precede the question; empty without num_few_shot."""
    dropped: DroppedQuestions = field(default_factory=DroppedQuestions)
    """Counts the records that are left out, here and where questions are rendered."""
    records: Sequence[Record] = field(default=(), compare=False)
    """All records of the split, those that max_samples leaves out too."""


def read(name: str, task: TaskConfig) -> TaskData:
    """Return the questions of the task `name`, with their worked examples.

    Random draws depend only on the task's seed and the records. Raises RecipeError if data are missing or a record does not
    have the format. With data.bad_records=drop such records are left out before anything is drawn.
    """
    key = f"evaluate.tasks.{name}"
    form = load_format(key, task)
    dropped = DroppedQuestions(task.data.bad_records == "drop")
    records = _usable(key, form, read_records(f"{key}.data", task, task.data.split), dropped)
    with _with_key(f"{key}.data"):
        indices = form.indices(records)
    chosen = [indices[number] for number in select(len(indices), task)]
    questions = _with_ids([_question(key, form, records, index) for index in chosen], records)
    return TaskData(questions, _examples(key, task, form, records, questions), dropped, records)


def load_format(key: str, task: TaskConfig) -> Format:
    """Return the format of a task. Raises RecipeError if it does not exist, or if format_kwargs do not fit."""
    if task.kind in HARNESS_KINDS:
        path = HARNESS_RECORDS.get(task.format, HARNESS_FORMAT)
    else:
        path = FORMATS.get(task.format, task.format)
    try:
        kind: type[Format] = user_code.load(path)
    except user_code.NotFound as error:
        raise RecipeError(Problem(f"{key}.format", "not-importable", f"'{path}': {error}")) from error
    if not (isinstance(kind, type) and issubclass(kind, Format)):
        message = f"got {path}; expected a class that derives from pipeline.evaluation.questions.Format"
        raise RecipeError(Problem(f"{key}.format", "wrong-type", message))
    arguments, problems = validate_mapping(kind.Arguments, f"{key}.format_kwargs", task.format_kwargs)
    if problems:
        raise RecipeError(*problems)
    return kind(arguments)


def subsets(data: TaskDataConfig) -> tuple[str | None, ...]:
    """Return the names of the data set's configurations whose records are joined; (None,) for the default configuration."""
    return tuple(part.strip() for part in data.subset.split(",")) if data.subset else (None,)


def data_files(key: str, data: TaskDataConfig, split: str) -> list[Path]:
    """Return the files of a split, for a task with data_path. Raises RecipeError for a file that does not exist."""
    assert data.data_path is not None
    path = Path(data.data_path)
    if path.is_dir():
        files = [_split_file(path / (subset or ""), split) for subset in subsets(data)]
    elif split != data.split:
        message = f"got the file {path}, which has the split {data.split}; expected a folder with {data.split}{path.suffix} and"
        hint = f"{split}{path.suffix}, since few_shot_split is {split}"
        raise RecipeError(Problem(f"{key}.data_path", "contradiction", f"{message} {hint}"))
    else:
        files = [path]
    missing = [file for file in files if not file.is_file()]
    if missing:
        entries = itertools.islice(path.rglob("*"), sources.MOST_ENTRIES)
        others = sorted(str(file.relative_to(path)) for file in entries if suffix_format(file))[:SHOWN]
        hint = "Try a path from the recipe's file, or on the command line from the working directory"
        hint = f"Try {key}.split or {key}.subset: the folder has {', '.join(others)}" if others else hint
        messages = [f"there is no file {file}. {hint}" for file in missing]
        raise RecipeError(*(Problem(f"{key}.data_path", "file-not-found", message) for message in messages))
    return files


def _split_file(folder: Path, split: str) -> Path:
    """Return the file of a split in a folder, in any format; SPLIT.jsonl if there is none."""
    files = [file for file in sorted(folder.glob(f"{glob.escape(split)}.*")) if suffix_format(file)]
    return files[0] if len(files) == 1 else folder / f"{split}.jsonl"


def to_question(form: Format, record: Record, index: int) -> Question:
    """Return the question of a record. index: the record's index. Raises ValueError if the record does not have the format."""
    for column in form.required:
        try:
            value_of(record, column)
        except ValueError as error:
            keys = [name for name, value in vars(form.arguments).items() if name.endswith("_key") and value == column]
            raise ValueError(f"{error}{f'. Try format_kwargs.{keys[0]}=COLUMN' if keys else ''}") from None
    try:
        return form.question(record, index)
    except (AttributeError, LookupError, TypeError) as error:  # such as a number in place of a text
        raise ValueError(f"the record does not fit the format: {type(error).__name__}: {error}") from error


# ---- records ---------------------------------------------------------------------------------------------------------------


def read_records(key: str, task: TaskConfig, split: str) -> Sequence[Record]:
    """Return the records of a split. key: the key of the task's data. Raises RecipeError."""
    data = task.data
    if data.data_path is not None and data.dataset_name is not None:
        raise RecipeError(Problem(key, "contradiction", "got both dataset_name and data_path; expected one of them"))
    if data.data_path is not None:
        datasets = [DatasetConfig(data_path=str(file)) for file in data_files(key, data, split)]
    else:
        datasets = [
            DatasetConfig(dataset_name=data.dataset_name, subset=subset, split=split, kwargs=data.kwargs)
            for subset in subsets(data)
        ]
    with _with_key(key):
        parts = [load_records(dataset, task.seed, data.bad_records == "drop") for dataset in datasets]
    return sources.joined(parts)


def _usable(key: str, form: Format, records: Sequence[Record], dropped: DroppedQuestions) -> Sequence[Record]:
    """Return the records that have the format, if the task drops bad ones.

    Otherwise return all records; the use of a bad record then raises RecipeError.
    """
    if not dropped.drops:
        return records
    usable = []
    for index in range(len(records)):
        with dropped.dropping():
            _question(key, form, records, index)
            usable.append(records[index])
    dropped.check(len(usable))
    return usable


@contextlib.contextmanager
def _with_key(key: str) -> Iterator[None]:
    """Turn errors of the block, which reads data, into RecipeErrors at the recipe's `key`."""
    try:
        with with_key(key):
            yield
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(Problem(key, "unreadable", str(error))) from error
    except ValueError as error:
        raise RecipeError(Problem(key, "bad-record", str(error))) from error


def select(count: int, task: TaskConfig) -> list[int]:
    """Return the indices of max_samples random records, in order. A larger max_samples keeps the records of a smaller one."""
    most = task.data.max_samples
    if most is None or most >= count:
        return list(range(count))
    return sorted(np.random.default_rng(task.seed).permutation(count)[:most].tolist())


def _question(key: str, form: Format, records: Sequence[Record], index: int) -> Question:
    try:
        return replace(to_question(form, records[index], index), index=index)
    except ValueError as error:
        raise RecipeError(Problem(f"{key}.data", "bad-record", f"{record_location(records, index)}: {error}")) from error


def _with_ids(questions: list[Question], records: Sequence[Record]) -> tuple[Question, ...]:
    """Return the questions, with a new id for each question that has none or shares its id with others."""
    counts = Counter(question.id for question in questions)
    return tuple(
        question if question.id and counts[question.id] == 1 else replace(question, id=_made_id(question, records))
        for question in questions
    )


def _made_id(question: Question, records: Sequence[Record]) -> str:
    content = json.dumps(records[question.index], sort_keys=True, default=str)
    return f"{question.index}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"


# ---- worked examples -------------------------------------------------------------------------------------------------------


def _examples(
    key: str, task: TaskConfig, form: Format, records: Sequence[Record], questions: Sequence[Question]
) -> dict[str, tuple[Question, ...]]:
    """Return question id -> its worked examples. Records equal to the question's are left out."""
    if not task.num_few_shot:
        return {}
    split, pool = task.data.few_shot_split, records
    if split is None and form.examples:
        pool = form.examples
    elif split not in (None, task.data.split):
        # Bad records are left out here without being counted, since they are not questions.
        dropped = DroppedQuestions(task.data.bad_records == "drop")
        pool = _usable(key, form, read_records(f"{key}.data", task, split), dropped)
    make = functools.cache(lambda index: _question(key, form, pool, index))
    groups: dict[str, list[int]] = {}
    for index in range(len(pool)) if form.examples_by_group else ():
        groups.setdefault(make(index).group, []).append(index)
    takes_first = task.few_shot_choice == "first" or pool is form.examples
    # One generator for all records in order, also those that max_samples leaves out: the draws of lm-evaluation-harness.
    generator, by_index, chosen = random.Random(task.seed), {question.index: question for question in questions}, {}
    for index in range(len(records)):
        question = by_index.get(index)
        if question is None and (takes_first or form.examples_by_group):
            continue
        indices: Sequence[int] = range(len(pool))
        if question is not None and form.examples_by_group:
            generator, indices = random.Random(f"{task.seed} {index}"), groups.get(question.group, [])
        record = records[index] if pool is records else None
        if takes_first:
            others = (i for i in indices if record is None or pool[i] != record)
            drawn = list(itertools.islice(others, task.num_few_shot))
        else:
            drawn = _draw(generator, task.num_few_shot, pool, indices, record)
        if question is not None and len(drawn) < task.num_few_shot:
            message = f"got {task.num_few_shot}, but there are only {len(drawn)} records to choose worked examples from"
            raise RecipeError(Problem(f"{key}.num_few_shot", "too-large", message))
        if question is not None:
            chosen[question.id] = tuple(map(make, drawn))
    return chosen


def _draw(
    generator: random.Random, count: int, pool: Sequence[Record], indices: Sequence[int], record: Record | None
) -> list[int]:
    """Draw `count` of `indices`, or all if they are fewer. Records equal to `record` are left out; None: there is none."""
    if record is None:
        return generator.sample(indices, min(count, len(indices)))
    sample = generator.sample(indices, min(count + 1, len(indices)))
    drawn = [index for index in sample if pool[index] != record][:count]
    if len(drawn) < count:
        others = [index for index in indices if pool[index] != record]
        drawn = generator.sample(others, min(count, len(others)))
    return drawn

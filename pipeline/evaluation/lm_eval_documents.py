"""Build tasks of lm-evaluation-harness on the records of a task's section `data`, and choose the documents to ask.

The harness's task has the prompts, the metrics and the split of its few-shot examples. The section says where the records are,
how many are asked, and how prompts are built. A section without records leaves the harness's own data sets. A group such as
mmlu divides the records over its tasks: a task has those whose category (`format_kwargs.group_key`) is its dataset_name.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports] optional package
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports] as above
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports] as above
from lm_eval.tasks._yaml_loader import load_yaml  # pyright: ignore[reportMissingImports] as above

from pipeline.algorithms.evaluate import HARNESS_FORMATS, TaskConfig
from pipeline.data.datasets import record_location
from pipeline.evaluation import task_data
from pipeline.evaluation.questions import Question, Record
from pipeline.recipe.problems import Problem, RecipeError

TASKS = Path(lm_eval.__file__).parent / "tasks"
DOCUMENTS = {
    "task": "documents",
    "output_type": "loglikelihood_rolling",
    "test_split": "test",
    "doc_to_text": "",
    "metric_list": [
        {"metric": metric, "aggregation": aggregation, "higher_is_better": False}
        for metric, aggregation in (
            ("bits_per_byte", "bits_per_byte"),
            ("byte_perplexity", "weighted_perplexity"),
            ("word_perplexity", "weighted_perplexity"),
        )
    ],
}
"""The harness's configuration of format=documents, without the column of the text."""
ACCURACIES = ("acc", "acc_norm", "acc_bytes")
"""Metrics of each task of choices whose prompt is a template, so that the choices share it; beside the task's own."""


@dataclass(frozen=True)
class Documents:
    """Tasks of the harness, and their documents to ask."""

    tasks: dict[str, ConfigurableTask]
    samples: dict[str, list[int]]
    """Task -> indices of its documents to ask, ascending and not empty."""
    questions: dict[tuple[str, int], Question]
    """(Task, index of a document) -> the question of this evaluation that it is: its id and group."""
    dropped: task_data.DroppedQuestions

    def add(self, built: ConfigurableTask, task: str, document: int, question: Question) -> None:
        """Add a document to ask, after those of its task that are before it."""
        self.tasks[task] = built
        self.samples.setdefault(task, []).append(document)
        self.questions[task, document] = question


class _RecordsTask(ConfigurableTask):
    """A task of the harness whose splits may be given."""

    def __init__(self, config: dict[str, Any], splits: dict[str, Dataset] | None) -> None:
        self._splits = splits
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._splits is None:
            super().download(dataset_kwargs, **kwargs)
        else:
            self.dataset = self._splits


def manager(formats: Sequence[str], include_path: str | None) -> TaskManager:
    """Return the harness's index of tasks, with those of the folder include_path.

    formats: the tasks that are looked up, if all are known; else []. To index all of the harness's 14,000 files takes seconds,
    so only the folders with whose name a format begins are read, if they define all.
    """
    names = [HARNESS_FORMATS.get(name, name) for name in formats]
    folders = [str(path) for path in TASKS.iterdir() if path.is_dir() and any(name.startswith(path.name) for name in names)]
    few = TaskManager(include_path=[*folders, *([include_path] if include_path else [])], include_defaults=False)
    entries = [few.task_index.get(name) for name in names if name != DOCUMENTS["task"]]
    if names and all(entry is not None and entry.kind.name != "TAG" for entry in entries):
        return few
    return TaskManager(include_path=include_path)


def build(name: str, config: TaskConfig, manager: TaskManager) -> Documents:
    """Build the harness's tasks for the task `name` of a suite.

    Raises RecipeError if the harness does not have the task, for data that are missing, and for records that it cannot ask.
    """
    key = f"evaluate.tasks.{name}"
    configs = {task: _adapted(of, config) for task, of in _configs(key, config, manager).items()}
    of_harness = config.data.dataset_name is None and config.data.data_path is None
    documents = _of_harness(key, config, configs) if of_harness else _of_records(name, config, configs)
    metrics = dict.fromkeys(metric for built in documents.tasks.values() for metric in built.aggregation())
    if config.metric is not None and config.metric.partition(",")[0] not in metrics:
        message = f"got {config.metric}; expected a metric of {config.format}: {', '.join(metrics)}"
        raise RecipeError(Problem(f"{key}.metric", "not-a-choice", message))
    return documents


def _of_records(name: str, config: TaskConfig, configs: dict[str, dict[str, Any]]) -> Documents:
    """Return the documents of the task's own records."""
    key = f"evaluate.tasks.{name}"
    read = task_data.read(name, config)
    pool, shares_pool = read.records, _examples_are_questions(config)
    if config.num_few_shot and not shares_pool:
        pool = task_data.read_records(f"{key}.data", config, str(config.data.few_shot_split))
    group_key = config.format_kwargs.get("group_key", "subject")
    questions = {question.index: question for question in read.questions}
    documents = Documents({}, {}, {}, read.dropped)
    for task, of in configs.items():
        category = (group_key, of.get("dataset_name")) if len(configs) > 1 else None
        rows, examples = _rows(read.records, category), _rows(pool, category)
        if not any(row in questions for row in rows):
            continue
        if config.num_few_shot > len(examples) - shares_pool:
            message = f"got {config.num_few_shot}, but {task} has only {len(examples)} records to choose worked examples from"
            raise RecipeError(Problem(f"{key}.num_few_shot", "too-large", message))
        with _naming(f"{key}.data", f"the records do not fit lm-evaluation-harness's task {task}"):
            built = _RecordsTask(of, _splits(of, _dataset(read.records, rows), _dataset(pool, examples)))
        if len(built.eval_docs) != len(rows):
            message = f"lm-evaluation-harness's task {task} asks only {len(built.eval_docs)} of {len(rows)} records"
            raise RecipeError(Problem(f"{key}.data", "unsupported", f"{message}; expected all. Try data without the others"))
        for document, row in enumerate(rows):
            if row in questions:
                with read.dropped.dropping(), _naming(f"{key}.data", record_location(read.records, row)):
                    _check(built, built.eval_docs[document], read.records[row], read.records[rows[0]])
                    documents.add(built, task, document, questions[row])
    read.dropped.check(len(documents.questions))
    if not documents.tasks:
        expected = ", ".join(str(of.get("dataset_name")) for of in configs.values())
        raise RecipeError(Problem(f"{key}.data", "bad-record", f"no record has in '{group_key}' one of {expected}"))
    return documents


def _check(task: ConfigurableTask, document: Mapping[str, Any], record: Record, first: Record) -> None:
    """Raise an error for a document that the task cannot ask, or a record that lacks columns of the `first` one."""
    if missing := first.keys() - record.keys():
        raise ValueError(f"has no '{min(missing)}', which the first record has")
    text, target = task.doc_to_text(document), task.doc_to_target(document)
    if task.OUTPUT_TYPE == "loglikelihood_rolling" and not target:
        raise ValueError("has no text to score")
    if task.config.doc_to_choice is not None:
        right, choices = text if task.multiple_input else target, task.doc_to_choice(document)
        if isinstance(right, int) and not 0 <= right < len(choices):
            raise ValueError(f"got {right} as the index of the right choice; expected 0 to {len(choices) - 1}")


@contextlib.contextmanager
def _naming(key: str, where: str) -> Iterator[None]:
    """Turn any error of the block, which runs a task's code on records, into a RecipeError of a bad record."""
    try:
        yield
    except Exception as error:  # of the task's own code, such as a KeyError
        message = f"{where}: {type(error).__name__}: {error}"
        raise RecipeError(Problem(key, "bad-record", message)) from error


def _of_harness(key: str, config: TaskConfig, configs: dict[str, dict[str, Any]]) -> Documents:
    """Return the documents of the harness's own data sets."""
    with _naming(f"{key}.data", "lm-evaluation-harness cannot read its data set"):
        tasks = {task: _RecordsTask(of, None) for task, of in configs.items()}
    places = [(task, document) for task, built in tasks.items() for document in range(len(built.eval_docs))]
    documents = Documents({}, {}, {}, task_data.DroppedQuestions())
    for task, document in [places[number] for number in task_data.select(len(places), config)]:
        id, group = f"{document:07d}", task if len(tasks) > 1 else ""
        documents.add(tasks[task], task, document, Question(f"{group}/{id}" if group else id, "", group=group))
    return documents


# ---- the harness's configuration --------------------------------------------------------------------------------------------


def _configs(key: str, config: TaskConfig, manager: TaskManager) -> dict[str, dict[str, Any]]:
    """Return the harness's configuration of each task that the format names: one task, or the tasks of a group or a tag."""
    name = HARNESS_FORMATS.get(config.format, config.format)
    if name == DOCUMENTS["task"]:
        return {name: {**DOCUMENTS, "doc_to_target": operator.itemgetter(config.format_kwargs.get("text_key", "text"))}}
    if name not in manager.task_index:
        raise RecipeError(Problem(f"{key}.format", "not-a-choice", f"lm_eval has no task {name}"))
    configs = dict(_leaves(name, manager))
    if fixed := [task for task, of in configs.items() if "class" in of]:
        message = f"got {', '.join(fixed)}, which is Python code; expected tasks in YAML. Try evaluate.lm_eval.tasks"
        raise RecipeError(Problem(f"{key}.format", "unsupported", message))
    return configs


def _leaves(name: str, manager: TaskManager) -> Iterator[tuple[str, dict[str, Any]]]:
    entry = manager.task_index[name]
    of = dict(load_yaml(entry.yaml_path, resolve_func=True)) if entry.yaml_path is not None else {}
    members = sorted(entry.tags) if entry.kind.name == "TAG" else of["task"] if entry.kind.name == "GROUP" else []
    for member in members:
        yield from _leaves(member if isinstance(member, str) else member["task"], manager)
    if not members:
        yield name, {option: value for option, value in of.items() if option not in ("tag", "group")}


def _adapted(of: dict[str, Any], config: TaskConfig) -> dict[str, Any]:
    """Return a task's configuration with the settings of the section."""
    of = {**of, "num_fewshot": config.num_few_shot}
    if config.answer_prefix:
        of["gen_prefix"] = _literal(config.answer_prefix)
    if config.num_few_shot and config.few_shot_choice == "first":
        of["fewshot_config"] = {**(of.get("fewshot_config") or {}), "sampler": "first_n"}
    if config.num_few_shot and _examples_are_questions(config):
        of["test_split"] = of["fewshot_split"] = _question_split(of)  # the harness then leaves out the question itself
    elif not (of.get("fewshot_split") or of.get("training_split")):
        of["fewshot_split"] = "few_shot"
    if of["output_type"] == "multiple_choice" and isinstance(of["doc_to_text"], str) and "process_results" not in of:
        metrics = list(of.get("metric_list") or [{"metric": "acc"}])
        missing = set(ACCURACIES).difference(metric["metric"] for metric in metrics)
        more = [{"metric": name} for name in ACCURACIES if name in missing]
        of["metric_list"] = [{"aggregation": "mean", "higher_is_better": True, **metric} for metric in [*metrics, *more]]
    return of


def _literal(text: str) -> str:
    """Return a template of the harness that renders as `text`: it must not run what a recipe has between braces."""
    return text.replace("{", "{{ '{' }}") + "{{ '' }}"  # the end keeps a text apart from the name of a column


def _examples_are_questions(config: TaskConfig) -> bool:
    """Return whether few-shot examples are drawn from the split of the questions."""
    return config.data.few_shot_split in (None, config.data.split)


def _question_split(of: Mapping[str, Any]) -> str:
    return of.get("test_split") or of["validation_split"]


def _splits(of: Mapping[str, Any], questions: Dataset, examples: Dataset) -> dict[str, Dataset]:
    """Return the records of each split that a task's configuration names: all but the questions' are for few-shot examples."""
    names = (of.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot"))
    return dict.fromkeys(filter(None, names), examples) | {_question_split(of): questions}


def _dataset(records: Sequence[Record], rows: Sequence[int]) -> Dataset:
    return Dataset.from_list([dict(records[row]) for row in rows])


def _rows(records: Sequence[Record], category: tuple[str, Any] | None) -> list[int]:
    """Return the indices of the records of a category, (its column, its value); None: of all records."""
    if category is None:
        return list(range(len(records)))
    column, value = category
    return [row for row in range(len(records)) if records[row].get(column) == value]

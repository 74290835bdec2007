"""Build tasks of lm-evaluation-harness on the records of a task's section `data`, and choose the documents to ask.

The harness's task has the prompts, the metrics and the split of its few-shot examples. The section says where the records are,
how many are asked, and how prompts are built. A section without records leaves the harness's own data sets. A group such as
mmlu divides the records over its tasks: a task has those whose category (`format_kwargs.group_key`) is its dataset_name.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lm_eval  # pyright: ignore[reportMissingImports] optional package
from datasets import Dataset
from lm_eval.api.samplers import FirstNSampler  # pyright: ignore[reportMissingImports] as above
from lm_eval.api.task import ConfigurableTask  # pyright: ignore[reportMissingImports] as above
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports] as above
from lm_eval.tasks._index import Entry, TaskIndex  # pyright: ignore[reportMissingImports] as above
from lm_eval.tasks._yaml_loader import load_yaml  # pyright: ignore[reportMissingImports] as above
from typing_extensions import override

from pipeline.algorithms.evaluate import HARNESS_DOCUMENTS, HARNESS_FORMATS, HARNESS_OWN, TaskConfig
from pipeline.data.datasets import record_location
from pipeline.evaluation import task_data
from pipeline.evaluation.formats.bias_benchmarks import WINOBIAS
from pipeline.evaluation.questions import Question, Record
from pipeline.recipe.problems import Problem, RecipeError

TASKS = Path(lm_eval.__file__).parent / "tasks"
DOCUMENTS = {
    "task": HARNESS_DOCUMENTS,
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
OTHER_DOCUMENT = {"": ""}
"""Stands for a document that is not read and is no few-shot example."""


class AskedTask(ConfigurableTask):
    """A task of the harness that asks some of its documents, with the few-shot examples that they have if it asks all."""

    def __init__(self, config: dict[str, Any], documents: _Split | None, has_all: bool) -> None:
        """Build the task, which reads its first document.

        documents: those of each split; None: the harness's own data set. has_all: they include documents that are not asked.
        """
        self._documents = documents
        self._has_all = has_all
        self.asked: dict[int, int] = {}
        """Index of a document to ask, ascending -> its place among all documents that could be asked."""
        self._places: Iterator[int] = iter(())
        self._next_place = 0
        super().__init__(config=config)

    @override
    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._documents is None:
            super().download(dataset_kwargs, **kwargs)
        else:
            self.dataset = defaultdict(lambda: self._documents)

    @override
    def doc_iterator(self, **options: Any) -> Iterator[tuple[int, Any]]:
        return ((document, self.task_docs[document]) for document in self.asked)

    @override
    def build_all_requests(self, **options: Any) -> None:
        self._places, self._next_place = iter(self.asked.values()), 0
        super().build_all_requests(**options)

    @override
    def fewshot_context(self, doc: Any, num_fewshot: int, **options: Any) -> Any:
        """Return the prompt of the next document, after drawing the examples of the documents before it that are not asked."""
        place = next(self._places)
        if num_fewshot and not isinstance(self.sampler, FirstNSampler):
            leaves_out = self.fewshot_cfg.split == self.config.test_split  # the document itself, by drawing one more
            for skipped in range(self._next_place, place):
                document = self.task_docs[skipped] if self._has_all else OTHER_DOCUMENT
                self.sampler.sample(num_fewshot, eval_doc=document if leaves_out else None)
        self._next_place = place + 1
        return super().fewshot_context(doc, num_fewshot, **options)


class _Split(list[Mapping[str, Any]]):
    """Documents in the form in which a task of the harness reads them."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])


@dataclass(frozen=True)
class Documents:
    """Tasks of the harness, and their documents to ask."""

    tasks: dict[str, AskedTask]
    questions: dict[tuple[str, int], Question]
    """(Task, index of a document) -> the question of this evaluation that it is: its id and group."""
    dropped: task_data.DroppedQuestions

    def add(self, built: AskedTask, task: str, document: int, place: int, question: Question) -> None:
        """Add a document to ask, after those of its task that are before it. place: among all that could be asked."""
        self.tasks[task] = built
        built.asked[document] = place
        self.questions[task, document] = question


class HarnessManager(TaskManager):
    """The harness's index of tasks, whose `load` raises RecipeError for a task that cannot be built."""

    @override
    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # of missing data, or of the task's own code
            names = ", ".join(str(getattr(task, "task_name", task)) for task in task_list)
            message = f"got {names}; lm-evaluation-harness cannot load them: {type(error).__name__}: {error}"
            raise RecipeError(Problem("evaluate.lm_eval.tasks", "unavailable-dataset", message)) from error


def manager(formats: Sequence[str], include_path: str | None) -> HarnessManager:
    """Return the harness's index of tasks, with those of the folder include_path.

    formats: the tasks that are looked up, if all are known; else []. To index all of the harness's 14,000 files takes seconds,
    so only the folders with whose name a format begins are read, if they define all.
    """
    names = [HARNESS_FORMATS.get(name, name) for name in formats]
    folders = [str(path) for path in TASKS.iterdir() if path.is_dir() and any(name.startswith(path.name) for name in names)]
    few = HarnessManager(include_path=[*folders, *([include_path] if include_path else [])], include_defaults=False)
    entries = [few.task_index.get(name) for name in names if name not in HARNESS_OWN]
    if names and all(entry is not None and entry.kind.name != "TAG" for entry in entries):
        return few
    return HarnessManager(include_path=include_path)


def index(folders: Iterable[Path]) -> Mapping[str, Entry]:
    """Return the index of the tasks below folders. Nothing of the tasks' code is imported."""
    return TaskIndex.build(folders)


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
    pool = read.records
    if config.num_few_shot and not _examples_are_questions(config):
        pool = task_data.read_records(f"{key}.data", config, str(config.data.few_shot_split))
    group_key = config.format_kwargs.get("group_key", "subject")
    categories = [of.get("dataset_name") for of in configs.values()] if len(configs) > 1 else None
    rows, examples = (_rows(records, group_key, categories is not None) for records in (read.records, pool))
    documents = Documents({}, {}, read.dropped)
    questions = {question.index: question for question in read.questions}
    for row in questions:
        if categories and (category := _category(read.records[row], group_key)) not in categories:
            with read.dropped.dropping(), _naming(f"{key}.data", record_location(read.records, row)):
                raise ValueError(f"got {category!r} in '{group_key}'; expected one of {', '.join(map(str, categories))}")
    for task, of in configs.items():
        category = of.get("dataset_name") if categories else None
        source = _Source(key, task, read.records, rows.get(category, []), questions, read.dropped)
        if not questions.keys().isdisjoint(source.rows):
            worked = replace(source, records=pool, rows=examples.get(category, []), questions={})
            _add_task(documents, config, of, source, worked)
    read.dropped.check(len(documents.questions))
    return documents


@dataclass(frozen=True)
class _Source:
    """Records of one task of the harness."""

    key: str
    task: str
    records: Sequence[Record]
    rows: Sequence[int]
    questions: Mapping[int, Question]
    """Row -> the question, for the rows that are asked."""
    dropped: task_data.DroppedQuestions

    @contextlib.contextmanager
    def dropping(self, row: int) -> Iterator[None]:
        """Name the record of the block in any error, and drop it if the task drops bad records; only questions are counted."""
        dropped = self.dropped if row in self.questions else task_data.DroppedQuestions(self.dropped.drops)
        where = f"{record_location(self.records, row)} does not fit lm-evaluation-harness's task {self.task}"
        with dropped.dropping(), _naming(f"{self.key}.data", where):
            yield

    def documents(self, rows: Sequence[int], process: Callable[[Dataset], Any] | None) -> dict[int, Mapping[str, Any]]:
        """Return row -> its document, without the rows that are dropped. process: the task's code on a data set."""
        whole = []
        for row in rows:
            with self.dropping(row):
                if missing := self.records[self.rows[0]].keys() - self.records[row].keys():
                    raise ValueError(f"has no '{min(missing)}', which the first record has")
                whole.append(row)
        return self._processed(whole, process)

    def _processed(self, rows: Sequence[int], process: Callable[[Dataset], Any] | None) -> dict[int, Mapping[str, Any]]:
        if not rows:
            return {}
        try:
            made = Dataset.from_list([dict(self.records[row]) for row in rows])
            made = list(process(made) if process else made)
        except Exception:  # of the task's own code, or of records of different types
            if len(rows) == 1:
                with self.dropping(rows[0]):
                    raise
                return {}
            middle = len(rows) // 2  # halves find a bad record in few calls, each of which takes milliseconds
            return {**self._processed(rows[:middle], process), **self._processed(rows[middle:], process)}
        if len(made) != len(rows):
            message = f"lm-evaluation-harness's task {self.task} asks only {len(made)} of {len(rows)} records"
            raise RecipeError(
                Problem(f"{self.key}.data", "unsupported", f"{message}; expected all. Try data without the others")
            )
        documents: list[Any] = made
        return dict(zip(rows, documents, strict=True))


def _add_task(documents: Documents, config: TaskConfig, of: dict[str, Any], source: _Source, worked: _Source) -> None:
    """Build a task of the harness, and add its documents to ask. worked: the records of the few-shot examples."""
    settings, process = dict(of.get("fewshot_config") or {}), of.get("process_docs")
    of = {**of, "process_docs": None, "fewshot_config": {**settings, "process_docs": None}}
    worked_process, drops = settings.get("process_docs", process), source.dropped.drops
    shared = bool(config.num_few_shot) and _examples_are_questions(config)
    made = source.documents(source.rows if shared else [row for row in source.rows if row in source.questions], process)
    built, split = None, _Split()
    for row in list(made):
        with source.dropping(row):
            split[:] = [made[row]]
            built = AskedTask(of, split, has_all=shared)
        if built:
            break
        del made[row]
    if built is None:
        return
    split.clear()
    places = {row: place for place, row in enumerate(source.rows)}
    for row, document in made.items():
        with source.dropping(row):
            if row in source.questions or drops:
                _check(built, document)
            if row in source.questions:
                index = len(split)
                documents.add(built, source.task, index, index if shared else places[row], source.questions[row])
            split.append(document)
    if config.num_few_shot:
        examples: Sequence[Any] = split
        if not shared or worked_process is not process:
            examples = []
            for row, document in worked.documents(worked.rows, worked_process).items():
                with worked.dropping(row):
                    if drops and worked_process is process:
                        _check(built, document)
                    examples.append(document)
        if config.num_few_shot > len(examples) - shared:
            message = (
                f"got {config.num_few_shot}, but {source.task} has only {len(examples)} records to choose worked examples from"
            )
            raise RecipeError(Problem(f"{source.key}.num_few_shot", "too-large", message))
        built.sampler.replace_df(list(examples))


def _check(task: AskedTask, document: Mapping[str, Any]) -> None:
    """Raise an error for a document that the task cannot ask."""
    text, target = task.doc_to_text(document), task.doc_to_target(document)
    if task.OUTPUT_TYPE == "loglikelihood_rolling" and not target:
        raise ValueError("has no text to score")
    if task.config.doc_to_choice is not None:
        right, choices = text if task.multiple_input else target, task.doc_to_choice(document)
        if wrong := [choice for choice in choices if not isinstance(choice, str)]:
            raise TypeError(f"got {wrong[0]!r} as a choice; expected a text")
        if isinstance(right, int) and not 0 <= right < len(choices):
            raise ValueError(f"got {right} as the index of the right choice; expected 0 to {len(choices) - 1}")
        if isinstance(right, str) and right not in choices:  # the harness would count every answer as wrong
            raise ValueError(f"got {right!r} as the right choice; expected an index or one of {choices}")


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
        tasks = {task: AskedTask(of, None, has_all=True) for task, of in configs.items()}
    places = [(task, document) for task, built in tasks.items() for document in range(len(built.task_docs))]
    documents = Documents({}, {}, task_data.DroppedQuestions())
    for task, document in [places[number] for number in task_data.select(len(places), config)]:
        id, group = f"{document:07d}", task if len(tasks) > 1 else ""
        documents.add(tasks[task], task, document, document, Question(f"{group}/{id}" if group else id, "", group=group))
    return documents


# ---- the harness's configuration --------------------------------------------------------------------------------------------


def _configs(key: str, config: TaskConfig, manager: TaskManager) -> dict[str, dict[str, Any]]:
    """Return the harness's configuration of each task that the format names: one task, or the tasks of a group or a tag."""
    name = HARNESS_FORMATS.get(config.format, config.format)
    if name == HARNESS_DOCUMENTS:
        return {name: {**DOCUMENTS, "doc_to_target": operator.itemgetter(config.format_kwargs.get("text_key", "text"))}}
    if name == WINOBIAS["task"]:
        return {name: WINOBIAS}
    if name not in manager.task_index:
        raise RecipeError(Problem(f"{key}.format", "not-a-choice", f"lm_eval has no task {name}"))
    configs = {task: _configuration(entry) for task, entry in leaves([name], manager.task_index).items()}
    if fixed := [task for task, of in configs.items() if "class" in of]:
        message = f"got {', '.join(fixed)}, which is Python code; expected tasks in YAML. Try evaluate.lm_eval.tasks"
        raise RecipeError(Problem(f"{key}.format", "unsupported", message))
    return configs


def _configuration(entry: Entry) -> dict[str, Any]:
    """Return the configuration of a task, with the functions that it names."""
    of = load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path is not None else {}
    return {option: value for option, value in of.items() if option not in ("tag", "group")}


def leaves(members: Iterable[str | Mapping[str, Any]], index: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the tasks that `members` name, with those of groups and tags at any depth. Raises KeyError for an unknown name.

    members: names, or mappings such as groups list them: a name with other settings, or a whole group.
    """
    tasks: dict[str, Entry] = {}
    for member in members:
        name = member if isinstance(member, str) else member.get("group", member.get("task"))
        entry = index.get(name)
        if entry is None and not isinstance(member, str) and "group" in member:
            tasks |= leaves(member["task"], index)
        elif entry is None:
            raise KeyError(name)
        elif entry.kind.name in ("TAG", "GROUP"):
            tasks |= leaves(entry.cfg["task"] if entry.cfg else sorted(entry.tags), index)
        else:
            tasks[name] = entry
    return tasks


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


def _rows(records: Sequence[Record], column: str, divides: bool) -> dict[Any, list[int]]:
    """Return the value of a column -> the indices of its records; None -> all records, if the column does not divide them."""
    if not divides:
        return {None: list(range(len(records)))}
    rows: dict[Any, list[int]] = {}
    for row in range(len(records)):
        rows.setdefault(_category(records[row], column), []).append(row)
    return rows


def _category(record: Record, column: str) -> Any:
    """Return the record's value of a column; None for one that is no plain value."""
    value = record.get(column)
    return value if isinstance(value, str | int) else None

"""Run tasks of lm-evaluation-harness on the engines, and turn its results into answers and scores.

`answers/lm_eval.jsonl` keeps the answered requests, from which a restart goes on. The harness's own results, with all samples,
are in lm_eval_results.json. Each of its tasks has `answers/TASK.jsonl` and an entry in scores.json like any other task. A
metric in scores.json has the harness's name without `,none`. Metrics that are not means over documents (perplexity, F1, BLEU)
have the harness's value and no interval. Metrics of groups such as mmlu have the harness's value too, and an interval only if
the value is the mean over all documents of the group.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval  # pyright: ignore[reportMissingImports] optional package
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports] as above
from lm_eval.utils import handle_non_serializable  # pyright: ignore[reportMissingImports] as above

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.data.templates import check_template
from pipeline.evaluation.answers import FOLDER as ANSWERS
from pipeline.evaluation.answers import AnswerLog, encode_answers
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.lm_eval_model import KEY, EnginesLM, request_key
from pipeline.evaluation.questions import Answer, PerQuestion
from pipeline.evaluation.statistics import Interval, interval
from pipeline.files.storage import write_durably
from pipeline.files.stored_files import FileKey
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NAME = "lm_eval"
"""Name of the file in answers/ that keeps the answered requests."""
FILE = "lm_eval_results.json"
SAME = 1e-9  # difference of two computations of one mean


class HarnessTask:
    """A task of the harness whose documents are answered, in the form that `scores.summarize` expects."""

    warnings: Sequence[str] = ()

    def __init__(self, name: str, metric: str, max_new_tokens: int) -> None:
        self.name = name
        self.config = TaskConfig(kind=NAME, metric=metric or None, max_new_tokens=max_new_tokens)

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Do nothing: `HarnessRun.ask` has asked all requests."""

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return metric -> document id -> [its value], for the metrics that are means over documents."""
        names = dict.fromkeys(name for answer in answers for name in answer.metrics)
        return {name: {entry.question: [entry.metrics[name]] for entry in answers if name in entry.metrics} for name in names}


class HarnessRun:
    """The harness's tasks of one evaluation."""

    name = NAME

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look up the tasks. Raises RecipeError for names that the harness does not know."""
        self._recipe, self._config, self._tokenizer = recipe, recipe.evaluate.lm_eval, tokenizer
        self._manager = TaskManager(include_path=self._config.include_path)
        names = set(self._manager.match_tasks(self._config.tasks))
        if unknown := [name for name in self._config.tasks if not self._manager.match_tasks([name])]:
            raise RecipeError(Problem(f"{KEY}.tasks", "not-a-choice", f"lm_eval has no task {', '.join(unknown)}"))
        self._names = sorted(names)
        self.results: dict[str, Any] = {}
        self.answers: dict[str, list[Answer]] = {}
        """Task's name -> its answers."""

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Ask the requests that `answers` lacks, and compute the results of all tasks."""
        config = self._config
        if config.apply_chat_template:
            check_template(self._tokenizer, self._recipe.policy.tokenizer.chat_template_kwargs)
        model = EnginesLM(self._recipe, self._tokenizer, engines, answers)
        self.results = lm_eval.simple_evaluate(
            model=model,
            tasks=self._names,
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            gen_kwargs=config.gen_kwargs or None,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.fewshot_as_multiturn,
            system_instruction=config.system_instruction,
            task_manager=self._manager,
            bootstrap_iters=0,  # scores.json has intervals of its own
            log_samples=True,
            random_seed=self._recipe.evaluate.seed,
            numpy_random_seed=self._recipe.evaluate.seed,
            torch_random_seed=self._recipe.evaluate.seed,
            fewshot_random_seed=self._recipe.evaluate.seed,
        )
        self.answers = {name: self._answers(name, model) for name in sorted(self.results["samples"])}

    def write(self, folder: Path, key: FileKey | None = None) -> None:
        """Write the harness's results, and the answers of each task, into the evaluation's folder. Raises OSError.

        key: encrypts the answers; None: they are plain. With a key the results leave out the samples, which are in the answers.
        """
        results = {name: value for name, value in self.results.items() if name != "samples" or key is None}
        write_durably(folder / FILE, json.dumps(results, indent=1, default=handle_non_serializable) + "\n")
        for name, answers in self.answers.items():
            path = folder / ANSWERS / f"{name}.jsonl"
            write_durably(path, encode_answers(answers, path.name, key).decode())

    def tasks(self) -> dict[str, tuple[Any, Sequence[Answer]]]:
        """Return name -> (HarnessTask, answers) of each task that was asked."""
        tasks = {}
        for name, answers in self.answers.items():
            metric = next(iter(self._values(name)), "")
            limit = self.results["configs"][name].get("generation_kwargs") or {}
            most = int(limit.get("max_gen_toks", self._config.max_gen_toks))
            tasks[name] = (HarnessTask(name, metric, most), answers)
        return tasks

    def complete(self, summary: dict[str, Any]) -> None:
        """Add the metrics that are not means over one task's documents to `summary`, the contents of scores.json."""
        tasks = summary["tasks"]
        for name in self.answers:
            for metric, value in self._values(name).items():
                tasks[name]["metrics"].setdefault(metric, _finite_values(Interval(value, math.nan, math.nan)))
            prefix = f"{name}: has no metric"  # all are added here
            summary["warnings"] = [warning for warning in summary["warnings"] if not warning.startswith(prefix)]
        for group in self.results.get("groups", {}):
            tasks.setdefault(group, self._group(group, tasks))

    def _group(self, group: str, tasks: Mapping[str, Any]) -> dict[str, Any]:
        leaves = sorted(self._leaves(group))
        values = self._values(group)
        counts = {name: sum(tasks[leaf][name] for leaf in leaves) for name in ("questions", "samples", "unjudged")}
        shares = {
            name: sum(tasks[leaf][name] * tasks[leaf]["samples"] for leaf in leaves) / max(1, counts["samples"])
            for name in ("truncated", "unparsed")
        }
        return {
            "kind": NAME,
            "metric": next(iter(values), ""),
            **counts,
            **shares,
            "metrics": {metric: _finite_values(self._over(leaves, metric, value)) for metric, value in values.items()},
            "groups": {leaf: {"questions": tasks[leaf]["questions"], "metrics": tasks[leaf]["metrics"]} for leaf in leaves},
        }

    def _over(self, leaves: Sequence[str], metric: str, value: float) -> Interval:
        """Return a group's metric with its interval. The ends are NaN unless `value` is the mean over all documents.

        leaves: the group's tasks. value: the harness's.
        """
        values = [answer.metrics.get(metric) for leaf in leaves for answer in self.answers[leaf]]
        documents = [(number,) for number in values if number is not None]
        if len(documents) == len(values) and abs((over := interval(documents)).value - value) < SAME:
            return over
        return Interval(value, math.nan, math.nan)

    def _leaves(self, group: str) -> set[str]:
        names = set(self.results["group_subtasks"].get(group, ()))
        return {leaf for name in names for leaf in (self._leaves(name) or {name})} & self.answers.keys()

    def _values(self, name: str) -> dict[str, float]:
        """Return metric -> the harness's value, for a task or a group. The metrics have the names of scores.json."""
        results = {**self.results["results"], **self.results.get("groups", {})}[name]
        values = {key: value for key, value in results.items() if "," in key and "_stderr," not in key}
        return {_name(*key.rsplit(",", 1)): float(value) for key, value in values.items() if isinstance(value, int | float)}

    def _answers(self, name: str, model: EnginesLM) -> list[Answer]:
        """Return an answer for each document of a task, with the metrics whose mean over documents is the harness's value."""
        documents: dict[str, Answer] = {}
        for sample in self.results["samples"][name]:
            id = f"{sample['doc_id']:07d}"
            answer = documents.get(id) or self._document(id, sample, model)
            values = {_name(metric, sample["filter"]): sample[metric] for metric in sample["metrics"]}
            numbers = {metric: float(value) for metric, value in values.items() if isinstance(value, int | float | bool)}
            documents[id] = replace(answer, metrics={**answer.metrics, **numbers})
        answers = list(documents.values())
        means = {metric: value for metric, value in self._values(name).items() if _is_mean(answers, metric, value)}
        averaged = [replace(document, metrics={metric: document.metrics[metric] for metric in means}) for document in answers]
        return [replace(document, score=next(iter(document.metrics.values()), 0.0)) for document in averaged]

    def _document(self, id: str, sample: Mapping[str, Any], model: EnginesLM) -> Answer:
        arguments = sample["arguments"][0]
        answer = model.drawn.get(request_key(arguments)) or Answer("", 0, None)
        responses = {"filtered": json.loads(json.dumps(sample["filtered_resps"], default=handle_non_serializable))}
        text, target = str(sample["resps"][0][0]), str(sample["target"])
        details = {"target": target, "hash": sample["doc_hash"], **responses}
        return Answer(id, 0, None, {}, str(arguments[0]), text, answer.tokens, answer.finish, details=details)


def _is_mean(answers: Sequence[Answer], metric: str, value: float) -> bool:
    values = [answer.metrics.get(metric, math.nan) for answer in answers]
    return bool(values) and abs(math.fsum(values) / len(values) - value) < SAME


def _name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _finite_values(estimate: Interval) -> dict[str, float | None]:
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

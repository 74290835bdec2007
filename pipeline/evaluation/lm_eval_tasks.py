"""Run tasks of lm-evaluation-harness on the engines, and turn its results into answers and scores.

`evaluate.lm_eval` names tasks of the harness. A task of the suite of kind `lm_eval` is one of them too, with the settings and
the data of its section. `answers/lm_eval.jsonl` keeps the answered requests of all, from which a restart goes on.

Each task has `answers/TASK.jsonl` and an entry in scores.json like any other task. The harness's own results of
`evaluate.lm_eval`, with all samples, are in lm_eval_results.json. A metric has the harness's name without `,none`. Perplexities
and bits per byte are quotients of sums: the values of the questions are a linearization of the quotient, so that their mean is
the quotient, and the standard error of their mean is the quotient's. Other metrics that are not means over documents (F1, BLEU)
have the harness's value and no interval. So have groups such as mmlu in `evaluate.lm_eval`, unless the value is the mean over
all documents of the group.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import lm_eval  # pyright: ignore[reportMissingImports] optional package
import numpy as np
from lm_eval.utils import handle_non_serializable  # pyright: ignore[reportMissingImports] as above

from pipeline.algorithms.evaluate import HARNESS_KINDS, LmEvalConfig, TaskConfig
from pipeline.config import Recipe
from pipeline.data.templates import check_template
from pipeline.evaluation import lm_eval_documents
from pipeline.evaluation.answers import FOLDER as ANSWERS
from pipeline.evaluation.answers import AnswerLog, encode_answers
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.formats import bias_benchmarks
from pipeline.evaluation.lm_eval_model import KEY, EnginesLM, request_key
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.statistics import Interval, Scale, interval
from pipeline.files.storage import write_durably
from pipeline.files.stored_files import FileKey
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NAME = "lm_eval"
"""Name of the file in answers/ that keeps the answered requests."""
FILE = "lm_eval_results.json"
LOG_2 = math.log(2)
BBQ = bias_benchmarks.BBQ_SCALES
SAME = 1e-9  # difference of two computations of one mean


QUOTIENTS: Mapping[str, Scale] = {
    "bits_per_byte": Scale(0.0),
    **dict.fromkeys(("byte_perplexity", "word_perplexity", "perplexity"), Scale(1.0, exponential=True)),
}
"""Metrics that are quotients of sums over documents -> their scale."""


class HarnessTask:
    """A task of the harness whose documents are answered, in the form that `scores.summarize` expects."""

    scales: ClassVar[Mapping[str, Scale]] = {**QUOTIENTS, **bias_benchmarks.SCALES}

    def __init__(self, name: str, config: TaskConfig, warnings: Sequence[str] = (), dropped: int = 0) -> None:
        self.name, self.config, self.warnings, self.dropped = name, config, warnings, dropped

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Do nothing: `HarnessRun.ask` has asked all requests."""

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return metric -> document id -> [its value], for means over documents, perplexities and bits per byte."""
        names = dict.fromkeys(name for answer in answers for name in answer.metrics)
        names |= dict.fromkeys(name for name in QUOTIENTS if any(name in answer.details.get("nats", ()) for answer in answers))
        metrics: dict[str, PerQuestion] = {
            name: _linearize(name, answers)
            if name in QUOTIENTS
            else {entry.question: [entry.metrics[name]] for entry in answers if name in entry.metrics}
            for name in names
        }
        gap = bias_benchmarks.pro_anti_gap({answer.question: answer.metrics for answer in answers})
        return {**metrics, bias_benchmarks.GAP: gap} if gap else metrics


def _nats_of(answer: Answer) -> dict[str, tuple[float, float]]:
    return answer.details.get("nats", {})


def _linearize(metric: str, answers: Sequence[Answer]) -> PerQuestion:
    """Return question id -> [value], where the mean of the values is f(nats per unit of all answers); {} if f overflows.

    Answer.details["nats"] has (log-likelihood, number of units) by metric. f is exp, for a perplexity, or nats / log 2.
    """
    pairs = {answer.question: _nats_of(answer)[metric] for answer in answers if metric in _nats_of(answer)}
    nats, counts = -np.array(list(pairs.values())).T[0], np.array(list(pairs.values())).T[1]
    ratio = math.fsum(nats) / math.fsum(counts)
    try:
        value, slope = (ratio / LOG_2, 1 / LOG_2) if metric == "bits_per_byte" else (math.exp(ratio),) * 2
    except OverflowError:  # a perplexity above the largest float
        return {}
    values = value + slope * (nats - ratio * counts) / counts.mean()
    return {question: [float(number)] for question, number in zip(pairs, values, strict=True)}


class HarnessRun:
    """The harness's tasks of one evaluation."""

    name = NAME

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, skipped: Collection[str] = ()) -> None:
        """Look up the tasks and read the data of the suite's own. skipped: tasks of the suite that are left out.

        Raises RecipeError for names that the harness does not know, and for data that it cannot ask.
        """
        self._recipe, self._config, self._tokenizer = recipe, recipe.evaluate.lm_eval, tokenizer
        configs = {name: config for name, config in harness_tasks(recipe).items() if name not in skipped}
        formats = [] if self._config.tasks else [config.format for config in configs.values()]
        self._manager = lm_eval_documents.manager(formats, self._config.include_path)
        names = set(self._manager.match_tasks(self._config.tasks))
        if unknown := [name for name in self._config.tasks if not self._manager.match_tasks([name])]:
            raise RecipeError(Problem(f"{KEY}.tasks", "not-a-choice", f"lm_eval has no task {', '.join(unknown)}"))
        self._names = sorted(names)
        leaves = lm_eval_documents.leaves(names, self._manager.task_index).keys()
        if twice := (names | leaves) & recipe.evaluate.tasks.keys():
            message = f"got {', '.join(sorted(twice))}, which evaluate.tasks has too; expected each name once"
            raise RecipeError(Problem(f"{KEY}.tasks", "contradiction", message))
        self.documents = {name: lm_eval_documents.build(name, config, self._manager) for name, config in configs.items()}
        """Task of the suite -> the harness's tasks and documents."""
        self.results: dict[str, Any] = {}
        """The harness's results of `evaluate.lm_eval`."""
        self.answers: dict[str, list[Answer]] = {}
        """Task's name -> its answers."""
        self._warnings: dict[str, list[str]] = {}

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Ask the requests that `answers` lacks, and compute the results of all tasks."""
        for name, documents in self.documents.items():
            config = self._recipe.evaluate.tasks[name]
            settings = LmEvalConfig(
                max_gen_toks=config.max_new_tokens,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.few_shot_as_turns,
                system_instruction=config.system_prompt,
            )
            model = EnginesLM(self._recipe, settings, self._tokenizer, engines, answers, name)
            results = self._evaluate(model, settings, config.seed, tasks=list(documents.tasks.values()))
            self._warnings[name] = [*documents.dropped.warnings, *model.warnings]
            self.answers[name] = [
                answer
                for task in documents.tasks
                for answer in _answers(results, task, model, documents.questions, config.metric)
            ]
        if self._names:
            model = EnginesLM(self._recipe, self._config, self._tokenizer, engines, answers)
            seed, options = self._recipe.evaluate.seed, {"num_fewshot": self._config.num_fewshot, "limit": self._config.limit}
            self.results = self._evaluate(model, self._config, seed, tasks=self._names, **options)
            self.answers |= {name: _answers(self.results, name, model) for name in sorted(self.results["samples"])}

    def _evaluate(self, model: EnginesLM, config: LmEvalConfig, seed: int, **options: Any) -> dict[str, Any]:
        """Return the harness's results. options: its tasks, and which documents are asked."""
        if config.apply_chat_template:
            check_template(self._tokenizer, self._recipe.policy.tokenizer.chat_template_kwargs)
        evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its arguments
        return evaluate(
            model=model,
            gen_kwargs=config.gen_kwargs or None,
            apply_chat_template=config.apply_chat_template,
            fewshot_as_multiturn=config.fewshot_as_multiturn,
            system_instruction=config.system_instruction,
            task_manager=self._manager,
            bootstrap_iters=0,  # scores.json has intervals of its own
            log_samples=True,
            **dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed),
            **options,
        )

    def write(self, folder: Path, key: FileKey | None = None) -> None:
        """Write the harness's results, and the answers of each task, into the evaluation's folder. Raises OSError.

        key: encrypts the answers; None: they are plain. With a key the results leave out the samples, which are in the answers.
        """
        if self.results:
            results = {name: value for name, value in self.results.items() if name != "samples" or key is None}
            write_durably(folder / FILE, json.dumps(results, indent=1, default=handle_non_serializable) + "\n")
        for name, answers in self.answers.items():
            path = folder / ANSWERS / f"{name}.jsonl"
            write_durably(path, encode_answers(answers, path.name, key).decode())

    def tasks(self) -> dict[str, tuple[Any, Sequence[Answer]]]:
        """Return name -> (HarnessTask, answers) of each task that was asked."""
        tasks = {}
        for name, answers in self.answers.items():
            if documents := self.documents.get(name):
                config = self._recipe.evaluate.tasks[name]
                task = HarnessTask(name, config, self._warnings[name], documents.dropped.count)
            else:
                limit = self.results["configs"][name].get("generation_kwargs") or {}
                most = int(limit.get("max_gen_toks", self._config.max_gen_toks))
                metric = next(iter(_values(self.results, name)), None)
                task = HarnessTask(name, TaskConfig(kind=NAME, metric=metric, max_new_tokens=most))
            tasks[name] = (task, answers)
        return tasks

    def complete(self, summary: dict[str, Any]) -> None:
        """Add the harness's metrics that `HarnessTask.metrics` lacks to `summary`, the contents of scores.json."""
        tasks = summary["tasks"]
        for name in self.results.get("samples", ()):
            for metric, value in _values(self.results, name).items():
                tasks[name]["metrics"].setdefault(metric, _finite_values(Interval(value, math.nan, math.nan)))
            prefix = f"{name}: has no metric"  # all are added here
            summary["warnings"] = [warning for warning in summary["warnings"] if not warning.startswith(prefix)]
        for group in self.results.get("groups", {}):
            tasks.setdefault(group, self._group(group, tasks))

    def _group(self, group: str, tasks: Mapping[str, Any]) -> dict[str, Any]:
        leaves = sorted(self._leaves(group))
        values = _values(self.results, group)
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


def harness_tasks(recipe: Recipe) -> dict[str, TaskConfig]:
    """Return the tasks of the suite that the harness asks."""
    return {name: config for name, config in recipe.evaluate.tasks.items() if config.kind in HARNESS_KINDS}


def _values(results: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return metric -> the harness's value, for a task or a group. The metrics have the names of scores.json."""
    values = {**results["results"], **results.get("groups", {})}[name]
    values = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
    return {_name(*key.rsplit(",", 1)): float(value) for key, value in values.items() if isinstance(value, int | float)}


def _answers(
    results: Mapping[str, Any],
    task: str,
    model: EnginesLM,
    questions: Mapping[tuple[str, int], Question] | None = None,
    metric: str | None = None,
) -> list[Answer]:
    """Return an answer for each document of a task, with the metrics whose mean over documents is the harness's value.

    questions: the id and the group of each document; None: the id is the document's number. metric: the one that is the score
    of an answer; None: the first, or the nats for each byte or word.
    """
    answers: dict[int, Answer] = {}
    for sample in results["samples"][task]:
        document = sample["doc_id"]
        if document not in answers:
            question = questions[task, document] if questions else Question(f"{document:07d}", "")
            answers[document] = _answer(question, sample, model)
        values = {_name(metric, sample["filter"]): sample[metric] for metric in sample["metrics"]}
        numbers = {metric: float(value) for metric, value in values.items() if isinstance(value, int | float | bool)}
        bias = {metric: bias_benchmarks.bbq_value(metric, value) for metric, value in values.items() if metric in BBQ}
        numbers |= {metric: value for metric, value in bias.items() if value is not None}
        nats = {metric: _nats(value) for metric, value in values.items() if metric in QUOTIENTS}
        if nats:
            answers[document].details.setdefault("nats", {}).update(nats)
        answers[document].metrics.update(numbers)
    kept, values = list(answers.values()), _values(results, task)
    for name in [name for name in _nats_of(kept[0]) if not _is_linearized(name, kept, values[name])]:
        for answer in kept:
            del answer.details["nats"][name]
    means = [name for name, value in values.items() if name in BBQ or _is_mean(kept, name, value)]
    kept = [
        replace(answer, metrics={name: answer.metrics[name] for name in means if name in answer.metrics}) for answer in kept
    ]
    return [replace(answer, score=_score(answer, metric)) for answer in kept]


def _score(answer: Answer, metric: str | None) -> float:
    if answer.metrics:
        return answer.metrics.get(metric or "", next(iter(answer.metrics.values())))
    log_likelihood, count = next(iter(_nats_of(answer).values()), (0.0, 1.0))
    return -log_likelihood / count


def _nats(value: Any) -> tuple[float, float]:
    """Return (log-likelihood, number of units) of a document's value of a perplexity, which may be its log-likelihood alone."""
    log_likelihood, count = value if isinstance(value, tuple | list) else (value, 1)
    return float(log_likelihood), float(count)


def _answer(question: Question, sample: Mapping[str, Any], model: EnginesLM) -> Answer:
    """Return the answer of a document, without its metrics. Of choices, the text is the most likely one."""
    arguments, responses = sample["arguments"], [response[0] for response in sample["resps"]]
    details: dict[str, Any] = {"target": str(sample["target"]), "hash": sample["doc_hash"]}
    if isinstance(responses[0], str):
        drawn = model.drawn.get(request_key(arguments[0])) or Answer("", 0, None)
        details["filtered"] = json.loads(json.dumps(sample["filtered_resps"], default=handle_non_serializable))
        text, tokens, finish = responses[0], drawn.tokens, drawn.finish
    elif isinstance(responses[0], float):  # of a whole text
        text, tokens, finish = "", 0, ""
        details["logprobs"] = responses
    else:
        choices, sums = [str(argument[1]) for argument in arguments], [float(response[0]) for response in responses]
        text, tokens, finish = choices[int(np.argmax(sums))].strip(), 0, ""
        details |= {"choices": choices, "logprobs": sums, "greedy": [bool(response[1]) for response in responses]}
    prompt = str(arguments[0][0])
    return Answer(question.id, 0, None, {}, prompt, text, tokens, finish, group=question.group, details=details)


def _is_mean(answers: Sequence[Answer], metric: str, value: float) -> bool:
    values = [answer.metrics[metric] for answer in answers if metric in answer.metrics]
    return metric not in QUOTIENTS and bool(values) and abs(math.fsum(values) / len(values) - value) < SAME


def _is_linearized(metric: str, answers: Sequence[Answer], value: float) -> bool:
    values = [number for (number,) in _linearize(metric, answers).values()]
    return bool(values) and math.isclose(math.fsum(values) / len(values), value, rel_tol=1e-6)


def _name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _finite_values(estimate: Interval) -> dict[str, float | None]:
    values = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

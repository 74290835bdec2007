"""Plan an evaluation: questions, tokens, an engine's memory, seconds and GPU-hours.

The number of questions comes from the data, if they are on this machine and small to read. Prompts have plan.prompt_tokens,
else the mean length in the data, at 4 characters a token for any tokenizer, else the guess of `lengths`. Answers have
plan.answer_tokens, else half of max_new_tokens. A likelihood task has no answers: an engine reads each record once.

Not counted: loading weights, the environments' work, judges behind endpoints, and further turns of an episode.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from launch.plan import generate_time, gpu_check, lengths, memory_generate, plan_table, roofline
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory
from launch.plan.plan_table import Line
from launch.plan.rank_division import engines
from launch.preflight import input_files
from launch.preflight.data_files import COUNT_BYTES
from launch.recipes.model_files import planning_config
from launch.terminal.units import plural, seconds
from pipeline.algorithms.evaluate import HARNESS_KINDS, TaskConfig
from pipeline.config import GENERATED_DATASETS, Problem, Recipe, collected
from pipeline.data.record_count import count_records
from pipeline.evaluation import task_data
from pipeline.models import flops
from pipeline.models.shape import ModelShape

CHARACTERS = 4.0  # of a token of text, as is assumed
CHOICE_TOKENS = 8  # of what is scored beside the texts of a record, as is assumed
READ = (*HARNESS_KINDS, "preference")  # kinds whose questions engines only read
SAMPLED = 200  # questions whose texts are measured


@dataclass(frozen=True)
class TaskPlan:
    """The questions and answers of one task."""

    name: str
    questions: int | None  # None: the data are not read before the job
    samples: int  # answers of each question; 0 for a task by likelihood
    lengths: Lengths  # of prompts with their worked examples, and of answers

    @property
    def read_tokens(self) -> float:
        """Return the number of tokens that engines read: each prompt once and, for a likelihood task, what is scored."""
        return (self.questions or 0) * (self.lengths.prompt + (0 if self.samples else self.lengths.answer))


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan of an evaluation."""

    recipe: Recipe
    shape: ModelShape
    memory: GenerateMemory
    tasks: tuple[TaskPlan, ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the generate component."""
        return self.recipe.cluster.generate.nodes * self.recipe.cluster.generate.gpus_per_node

    @property
    def is_timed(self) -> bool:
        """Return whether durations can be estimated, which needs GPUs and room for a KV cache."""
        return self.gpus > 0 and self.memory.tokens > 0

    def task_seconds(self, task: TaskPlan) -> float | None:
        """Return the seconds of a task; None if they are not known."""
        if not self.is_timed or task.questions is None:
            return None
        gpu = gpu_check.gpu(self.recipe, self.recipe.cluster.generate)
        engine = generate_time.engine(self.recipe, self.shape, gpu)
        count = engines(self.recipe.policy, self.recipe.cluster.generate)
        length = task.read_tokens / max(1, task.questions)
        work = flops.forward(self.shape, task.read_tokens, task.questions * length**2 / 2)
        duration_s = work / (count * engine.ranks * engine.rates.flops)
        if answers := task.questions * task.samples:
            slots = generate_time.slots(self.recipe, self.memory, task.lengths)
            parts = generate_time.decoding(engine, math.ceil(answers / count), slots, task.lengths, answers)
            duration_s += sum(parts.values())
        return duration_s

    @property
    def seconds(self) -> float | None:
        """Return the seconds of all tasks; None if the seconds of any task are unknown."""
        seconds_of = [self.task_seconds(task) for task in self.tasks]
        return None if None in seconds_of else sum(duration_s for duration_s in seconds_of if duration_s is not None)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the weights of a generate rank exceed the memory of its GPU."""
        yield from memory_generate.weights_problems(self.recipe, self.memory)

    def warnings(self) -> Iterator[str]:
        """Yield a warning if the KV cache may be too small for a sequence."""
        if self.gpus and self.memory.sequences < 1 and not any(self.problems()):
            yield memory_generate.small_cache(self.recipe, self.memory)


def plan(recipe: Recipe, pending: Sequence[os.PathLike] = (), reads: bool = False) -> EvaluationPlan | None:
    """Return the plan of an evaluation; None if a pending run has not written its model yet.

    pending: folders of runs that this recipe needs and that have not run yet. reads: whether to read data sets of the library
    `datasets` too. Raises RecipeError for an unknown model or GPU, or a plan.hardware that does not measure the recipe's GPUs.
    """
    recipe = gpu_check.with_measured_memory(recipe)
    model = planning_config(recipe.policy, list(pending))
    if model is None:
        return None
    shape = ModelShape.of(model, "policy.model_name")
    tasks = tuple(_task(recipe, name, task, reads) for name, task in recipe.evaluate.tasks.items())
    return EvaluationPlan(recipe, shape, memory_generate.generate(recipe, shape), tasks)


def _task(recipe: Recipe, name: str, task: TaskConfig, reads: bool) -> TaskPlan:
    is_readable = task.data.data_path is not None or task.data.dataset_name in GENERATED_DATASETS
    if reads and not is_readable:  # `datasets` would look for it on the network, with minutes of retries
        is_readable = not any(input_files.check_name("data", task.data.dataset_name))
    questions, prompt = _of_data(name, task) if is_readable else (None, None)
    questions = _lines(task) if questions is None else questions
    total, settings = recipe.policy.max_total_sequence_length, recipe.plan
    prompt = settings.prompt_tokens or prompt or min(lengths.PROMPT_TOKENS * (1 + task.num_few_shot), total / 2)
    prompt = min(prompt, total - 1)
    if task.kind in READ:
        return TaskPlan(name, questions, 0, Lengths(prompt, CHOICE_TOKENS, CHOICE_TOKENS, ""))
    limit = min(task.max_new_tokens, total - prompt)
    answer = min(settings.answer_tokens or lengths.ANSWER_SHARE * limit, limit)
    return TaskPlan(name, questions, task.num_samples, Lengths(prompt, answer, limit, ""))


def _of_data(name: str, task: TaskConfig) -> tuple[int | None, float | None]:
    """Return (number of questions, mean tokens of a prompt). Both are None if the data cannot be read here."""
    with collected([]):  # other checks report it
        data = task_data.read(name, task)
        questions = data.questions[:SAMPLED]
        if not questions:
            return 0, None
        texts = [
            _length(q.prompt) + sum(_length(e.prompt) + len(e.target) for e in data.examples.get(q.id, ())) for q in questions
        ]
        return len(data.questions), fmean(texts) / CHARACTERS
    return None, None


def _length(prompt: str | list[dict[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _lines(task: TaskConfig) -> int | None:
    """Return the number of questions by the records of a file or folder. For other data return max_samples, or None."""
    if task.data.data_path is None:
        return task.data.max_samples
    with collected(files := []):
        files = task_data.data_files("data", task.data, task.data.split)
    counts = [count_records(path, COUNT_BYTES) for path in files]
    if not files or None in counts:
        return task.data.max_samples
    count = sum(filter(None, counts))
    return min(count, task.data.max_samples or count)


# ---- the table ----------------------------------------------------------------------------------------------------------


def text(plan: EvaluationPlan) -> str:
    """Return the plan as a table for the terminal."""
    memory = plan_table.memory_rows(plan.recipe, {"generate": plan.memory.parts})
    return plan_table.joined((_headline(plan), _tasks(plan), memory, _run(plan), _verdict(plan)))


def _headline(plan: EvaluationPlan) -> Iterator[Line]:
    recipe, shape = plan.recipe, plan.shape
    yield f"{recipe.name}: plan for evaluate. All figures are estimates"
    yield "generate", f"{plan_table.ranks_text(recipe.cluster.generate)}; {plan_table.engines_text(recipe)}"
    layers = plural(shape.layers, "layer")
    yield "policy", f"{recipe.policy.model_name}: {shape.family}, {layers}, {shape.parameters:,} parameters"


def _tasks(plan: EvaluationPlan) -> Iterator[Line]:
    rows = [("task", "questions", "samples", "prompt", "answer", "seconds")]
    for task in plan.tasks:
        took = plan.task_seconds(task)
        questions, samples = "unknown" if task.questions is None else f"{task.questions:,}", str(task.samples or "-")
        tokens = f"{task.lengths.prompt:,.0f}", f"{task.lengths.answer:,.0f}"
        rows.append((task.name, questions, samples, *tokens, "-" if took is None else seconds(took)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        numbers = (f"{cell:>{width}s}" for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([f"{name:{widths[0]}s}", *numbers])


def _run(plan: EvaluationPlan) -> Iterator[Line]:
    yield "generate", f"an engine's KV cache holds {max(0.0, plan.memory.tokens):,.0f} tokens"
    if plan.seconds is not None:
        hours = f"{plan.gpus * plan.seconds / 3600:.3g} GPU-hours, without startup and waiting in the queue"
        yield "run", f"{seconds(plan.seconds)} on {plural(plan.gpus, 'GPU')}: {hours}"
    elif plan.is_timed:
        unknown = ", ".join(task.name for task in plan.tasks if task.questions is None)
        yield "run", f"its time is unknown: the data of {unknown} are not read here. Try plan=true"
    else:
        yield "run", f"its time is unknown: no {'room for a KV cache' if plan.gpus else 'GPUs in cluster.generate'}"
    if measured := gpu_check.describe(plan.recipe, plan.recipe.cluster.generate):
        yield "measured", measured
    if plan.gpus and plan.recipe.policy.deterministic:
        yield "deterministic", roofline.assumed_slowdown(plan.recipe)
    answer_tokens = plan.recipe.plan.answer_tokens
    answers = "answers of half of max_new_tokens" if answer_tokens is None else f"answers of {answer_tokens:g} tokens"
    yield (
        "assumed",
        f"prompts of plan.prompt_tokens, else of characters / 4, else guessed; {answers} (plan.answer_tokens). Not counted:"
        " loading weights, environments and judges, further turns",
    )


def _verdict(plan: EvaluationPlan) -> Iterator[Line]:
    if not plan.gpus:
        yield "verdict", "no GPUs: host memory is used, and its size is not known"
        return
    faults = [*map(str, plan.problems()), *plan.warnings()]
    yield "verdict", "does not fit" if faults else "fits, by these estimates"
    yield from (("", fault) for fault in faults)

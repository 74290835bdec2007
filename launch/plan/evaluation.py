"""Plan an evaluation: questions, tokens, an engine's memory, seconds and GPU-hours.

The number of questions comes from the data, if they are on this machine and small to read. Prompts have plan.prompt_tokens,
else the mean length in the data, at 4 characters a token for any tokenizer, else the guess of `lengths`. Answers have
plan.answer_tokens, else half of max_new_tokens. A likelihood task has no answers: an engine reads each record once.

Not counted: loading weights, the environments' work, judges behind endpoints, and further turns of an episode.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.plan import generate_time, gpu_check, lengths, memory_generate, roofline
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory
from launch.plan.rank_division import engines, parallel_sizes
from launch.preflight import input_files
from launch.recipes.model_files import planning_config
from launch.terminal.units import plural, seconds, size
from pipeline.algorithms.evaluate import HARNESS_KINDS, TaskConfig
from pipeline.config import GENERATED_DATASETS, Problem, Recipe, collected, hardware, ranks
from pipeline.evaluation import task_data
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from pipeline.recipe import user_files

LABEL, WIDTH = 14, 120
CHARACTERS = 4.0  # of a token of text, as is assumed
CHOICE_TOKENS = 8  # of what is scored beside the texts of a record, as is assumed
GIVEN, MEASURED, GUESSED = "plan.prompt_tokens", "characters / 4", "guessed"
LEAST = {GIVEN: 1.0, MEASURED: 1 / 3, GUESSED: 0.0}  # the assumed least part of an estimate of prompts, by its source
READ = (*HARNESS_KINDS, "preference")  # kinds whose questions engines only read
SAMPLED = 200  # questions whose texts are measured


@dataclass(frozen=True)
class TaskPlan:
    """The questions and answers of one task."""

    name: str
    questions: int | None  # None: the data are not read before the job
    samples: int  # answers of each question; 0 for a task by likelihood
    prompt: float  # mean tokens of a question with its worked examples
    lengths: Lengths  # of answers, whose prompt is `prompt`
    source: str  # of `prompt`: GIVEN, MEASURED or GUESSED

    @property
    def answers(self) -> int:
        """Return the number of answers to all questions."""
        return (self.questions or 0) * self.samples

    @property
    def read_tokens(self) -> float:
        """Return the number of tokens that engines read: each prompt once and, for a likelihood task, what is scored."""
        return (self.questions or 0) * (self.prompt + (0 if self.samples else self.lengths.answer))

    @property
    def drawn_tokens(self) -> float:
        """Return the number of tokens that engines sample."""
        return self.answers * self.lengths.answer


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
        engine, engine_count = (
            generate_time.engine(self.recipe, self.shape, gpu),
            engines(self.recipe.policy, self.recipe.cluster.generate),
        )
        length = task.read_tokens / max(1, task.questions)
        duration_s = flops.forward(self.shape, task.read_tokens, task.questions * length**2 / 2) / (
            engine_count * engine.ranks * engine.rates.flops
        )
        if task.answers:
            answers, slots = math.ceil(task.answers / engine_count), generate_time.slots(self.recipe, self.memory, task.lengths)
            duration_s += sum(generate_time.decoding(engine, answers, slots, task.lengths, task.answers).values())
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
        """Yield a warning if the KV cache may be too small for a sequence, and for each task whose longest answers are cut."""
        if self.gpus and self.memory.sequences < 1 and not any(self.problems()):
            longest = self.recipe.policy.generation.vllm_cfg.max_model_len
            yield (
                f"an engine's KV cache may hold only {max(0.0, self.memory.tokens):,.0f} tokens; a sequence of"
                f" policy.generation.vllm_cfg.max_model_len has {longest:,}"
            )
        total = self.recipe.policy.max_total_sequence_length
        for task in self.tasks:
            max_new_tokens = self.recipe.evaluate.tasks[task.name].max_new_tokens
            least = task.prompt * LEAST[task.source]
            if task.samples and least + max_new_tokens > total:
                yield (
                    f"{task.name}: prompts of at least {least:,.0f} tokens and max_new_tokens={max_new_tokens:,} exceed"
                    f" policy.max_total_sequence_length={total:,}; longer answers are cut"
                )


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
    source = GIVEN if settings.prompt_tokens else MEASURED if prompt else GUESSED
    prompt = settings.prompt_tokens or prompt or min(lengths.PROMPT_TOKENS * (1 + task.num_few_shot), total / 2)
    prompt = min(prompt, total - 1)
    if task.kind in READ:
        return TaskPlan(name, questions, 0, prompt, Lengths(prompt, CHOICE_TOKENS, CHOICE_TOKENS, ""), source)
    limit = min(task.max_new_tokens, total - prompt)
    answer = min(settings.answer_tokens or lengths.ANSWER_SHARE * limit, limit)
    return TaskPlan(name, questions, task.num_samples, prompt, Lengths(prompt, answer, limit, ""), source)


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
        return len(data.questions), _mean(texts) / CHARACTERS
    return None, None


def _length(prompt: str | list[dict[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _lines(task: TaskConfig) -> int | None:
    """Return the number of questions by the lines of a JSONL file or folder. For other data return max_samples, or None."""
    if task.data.data_path is None:
        return task.data.max_samples
    path = Path(task.data.data_path)
    files = [path] if path.is_file() else sorted(path.rglob(f"{task.data.split}.jsonl"))
    try:
        count = sum(map(user_files.count_lines, files))
    except OSError:
        return task.data.max_samples
    return min(count, task.data.max_samples or count)


# ---- the table ----------------------------------------------------------------------------------------------------------


def text(plan: EvaluationPlan) -> str:
    """Return the plan as a table for the terminal."""
    parts = (_headline(plan), _tasks(plan), _memory(plan), _run(plan), _verdict(plan))
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(plan: EvaluationPlan) -> Iterator[str]:
    recipe, on, shape = plan.recipe, plan.recipe.cluster.generate, plan.shape
    vllm = recipe.policy.generation.backend == "vllm"
    cuts = parallel_sizes(recipe.policy.generation.vllm_cfg) if vllm else "no parallelism"
    gpus_text = f"{on.gpus_per_node} {on.gpu} of {hardware.memory_gb(on):g} GB each" if on.gpus_per_node else "no GPUs"
    yield f"{recipe.name}: plan for evaluate. All figures are estimates"
    yield from _row(
        "generate",
        f"{plural(ranks(on), 'rank')} on {plural(on.nodes, 'node')}, {gpus_text};"
        f" {plural(engines(recipe.policy, on), 'engine')}, {cuts}",
    )
    yield from _row(
        "policy",
        f"{recipe.policy.model_name}: {shape.family}, {plural(shape.layers, 'layer')}, {shape.parameters:,} parameters",
    )


def _tasks(plan: EvaluationPlan) -> Iterator[str]:
    header = ("task", "questions", "samples", "prompt", "answer", "tokens", "seconds")
    rows: list[tuple[str, ...]] = [header]
    for task in plan.tasks:
        took = plan.task_seconds(task)
        is_counted = task.questions is not None
        rows.append(
            (
                task.name,
                f"{task.questions:,}" if is_counted else "unknown",
                str(task.samples) if task.samples else "-",
                f"{task.prompt:,.0f}",
                f"{task.lengths.answer:,.0f}",
                f"{task.read_tokens + task.drawn_tokens:,.0f}" if is_counted else "-",
                "-" if took is None else seconds(took),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for name, *numbers in rows:
        yield "  ".join(
            [f"{name:{widths[0]}s}", *(f"{number:>{width}s}" for number, width in zip(numbers, widths[1:], strict=True))]
        )


def _memory(plan: EvaluationPlan) -> Iterator[str]:
    yield "memory of the fullest generate rank"
    for name, nbytes in plan.memory.parts.items():
        yield f"  {name:28s}{size(nbytes):>14s}"
    yield f"  {'all':28s}{size(plan.memory.total):>14s}"
    if plan.gpus:
        yield f"  {'of a GPU with':28s}{hardware.memory_gb(plan.recipe.cluster.generate):>11g} GB"
    yield from _row("", f"an engine's KV cache holds {max(0.0, plan.memory.tokens):,.0f} tokens")


def _run(plan: EvaluationPlan) -> Iterator[str]:
    unknown = [task.name for task in plan.tasks if task.questions is None]
    if plan.seconds is not None:
        yield from _row(
            "run",
            f"{seconds(plan.seconds)} on {plural(plan.gpus, 'GPU')}: {plan.gpus * plan.seconds / 3600:.3g}"
            " GPU-hours, without startup and waiting in the queue",
        )
    elif not plan.is_timed:
        yield from _row(
            "run",
            "its time is unknown: no GPUs in cluster.generate"
            if not plan.gpus
            else "its time is unknown: no room for a KV cache",
        )
    else:
        yield from _row("run", f"its time is unknown: the data of {', '.join(unknown)} are not read here. Try plan=true")
    if measured := gpu_check.describe(plan.recipe, plan.recipe.cluster.generate):
        yield from _row("measured", measured)
    if plan.gpus and plan.recipe.policy.deterministic:
        yield from _row("deterministic", roofline.assumed_slowdown(plan.recipe))
    answer_tokens = plan.recipe.plan.answer_tokens
    answers = "answers of half of max_new_tokens" if answer_tokens is None else f"answers of {answer_tokens:g} tokens"
    yield from _row(
        "assumed",
        f"prompts of {_sources(plan.tasks)} tokens, {answers}; set plan.prompt_tokens and plan.answer_tokens to"
        " change the lengths. Not counted: loading weights, environments and judges, further turns",
    )


def _sources(tasks: Sequence[TaskPlan]) -> str:
    """Return a text with the source of the prompts' lengths. If there are several sources, name the tasks of each source."""
    by_source = {source: [task.name for task in tasks if task.source == source] for source in LEAST}
    nonempty = {source: names for source, names in by_source.items() if names}
    return " or ".join(source if len(nonempty) == 1 else f"{source} ({', '.join(names)})" for source, names in nonempty.items())


def _verdict(plan: EvaluationPlan) -> Iterator[str]:
    lines = [*map(str, plan.problems()), *plan.warnings()]
    if not plan.gpus:
        yield from _row("verdict", "no GPUs: host memory is used, and its size is not known")
    else:
        yield from _row(
            "verdict", "does not fit" if any(plan.problems()) or plan.memory.sequences < 1 else "fits, by these estimates"
        )
    for line in lines:
        yield from _row("", line)


def _row(label: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, break_on_hyphens=False, initial_indent=f"{label:{LABEL}s}", subsequent_indent=" " * LABEL
    )

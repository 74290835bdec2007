"""Evaluate: score a model on tasks. Nothing is trained, and the job has only generate ranks.

A task has a kind (KINDS), which asks and scores its questions, and a format (FORMATS), which turns the records of its data into
questions. A new kind or format is one file in `pipeline/evaluation/` and one line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.algorithms.algorithm import OnlineAlgorithm
from pipeline.algorithms.sections import UNBOUNDED
from pipeline.algorithms.served_models import JudgeConfig, RewardModelConfig
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Bool, Check, Float, Int, Line, NotNegative, Positive, Text, interpolation, not_a_kind

if TYPE_CHECKING:
    from pipeline.config import Recipe

HARNESS_KINDS = ("lm_eval", "choices", "continuation", "perplexity")
"""Kinds whose format is a task or a group of lm-evaluation-harness; all are one kind, and the last three its earlier names."""
HARNESS_DOCUMENTS = "documents"
HARNESS_OWN = (HARNESS_DOCUMENTS, "winobias")
"""Formats of these kinds that are no tasks of the harness: own texts, and WinoBias."""
HARNESS_RECORDS = {
    "bbq": "pipeline.evaluation.formats.bias_benchmarks.BBQ",
    "crows_pairs_english": "pipeline.evaluation.formats.bias_benchmarks.CrowsPairs",
    "winobias": "pipeline.evaluation.formats.bias_benchmarks.WinoBias",
}
"""Formats of these kinds whose records submission checks -> the class that reads them; others: any records."""
HARNESS_FORMATS = {"arc": "arc_easy", "lambada": "lambada_openai"}
"""Other name of a format of these kinds -> the harness's name of a task with the same prompt."""
KINDS = {
    **dict.fromkeys(HARNESS_KINDS, "pipeline.evaluation.lm_eval_tasks.HarnessTask"),
    "comparison": "pipeline.evaluation.baseline_comparison.ComparisonTask",
    "generate": "pipeline.evaluation.sampled.GenerationTask",
    "instructions": "pipeline.evaluation.sampled.InstructionTask",
    "multi_turn_rating": "pipeline.evaluation.multi_turn_rating.RatingTask",
    "preference": "pipeline.evaluation.preference.PreferenceTask",
    "refusal": "pipeline.evaluation.refusal.RefusalTask",
}
"""Name of a kind -> its class, a `pipeline.evaluation.task.Task`, which asks and scores questions."""
SAMPLED = ("generate", "instructions")
"""Kinds whose answers are sampled and scored by an environment."""

NOT_OF_HARNESS = (
    *("env_name", "num_samples", "temperature", "top_p", "top_k", "stop", "thinking_tokens", "thinking_end", "max_turns"),
    *("pass_at", "judge_prompt_file", "majority"),
)
"""Keys of a task that have no effect with HARNESS_KINDS, whose tasks define how answers are sampled and scored."""

JUDGED = ("comparison", "multi_turn_rating", "refusal")
"""Kinds whose answers `evaluate.judge` judges."""

FORMATS = {
    "aime24": "pipeline.evaluation.formats.mathematics.AIME24",
    "aime25": "pipeline.evaluation.formats.mathematics.AIME25",
    "alpaca_eval": "pipeline.evaluation.formats.chat_benchmarks.AlpacaEval",
    "arc_generative": "pipeline.evaluation.formats.science.GenerativeARC",
    "arena_hard": "pipeline.evaluation.formats.chat_benchmarks.ArenaHard",
    "gpqa": "pipeline.evaluation.formats.science.GPQA",
    "gsm8k": "pipeline.evaluation.formats.mathematics.GSM8K",
    "humaneval": "pipeline.evaluation.formats.programming.HumanEval",
    "ifeval": "pipeline.evaluation.formats.instruction_following.IFEvalPrompts",
    "livecodebench": "pipeline.evaluation.formats.programming.LiveCodeBench",
    "math500": "pipeline.evaluation.formats.mathematics.MATH500",
    "mbpp": "pipeline.evaluation.formats.programming.MBPP",
    "minerva_math": "pipeline.evaluation.formats.mathematics.MinervaMATH",
    "mmlu_generative": "pipeline.evaluation.formats.science.GenerativeMMLU",
    "mmlu_pro": "pipeline.evaluation.formats.science.MMLUPro",
    "mt_bench": "pipeline.evaluation.formats.chat_benchmarks.MTBench",
    "records": "pipeline.evaluation.formats.user_records.Records",
    "requests": "pipeline.evaluation.formats.refusal_requests.Requests",
    "reward_bench": "pipeline.evaluation.formats.reward_benchmarks.RewardBench",
}
"""Name of a format -> its class, a `pipeline.evaluation.questions.Format`, which turns records into questions."""


@dataclass
class TaskDataConfig:
    """Data of a task."""

    dataset_name: Line | None = None
    """Data set that `datasets` loads: a name in the local cache, or a folder. Or the dotted path of your own callable (split,
    seed=, **kwargs)."""
    data_path: Line | None = None
    """In place of dataset_name: a file in a format of data.train.data_path, or a folder that has SPLIT.jsonl (or SPLIT.parquet
    and others), or SUBSET/SPLIT.jsonl."""
    subset: Text | None = None
    """Configuration of the data set. Several, separated by commas, are joined. null: the default."""
    split: Text = "test"
    """Split of the questions."""
    few_shot_split: Text | None = None
    """Split of the few-shot examples. null: the format's examples, else `split` without the question."""
    max_samples: Positive | None = None
    """Number of questions, drawn with `seed`. A larger number includes the same questions. null: all."""
    bad_records: Literal["error", "drop"] = "error"
    """What to do with a record that cannot be asked, such as one that the chat template refuses. drop: leave it out and count
    it in scores.json."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of `datasets`, or of your own callable."""


@dataclass
class TaskConfig:
    """One task of a suite."""

    kind: Annotated[
        Text,
        Check(lambda kind: not_a_kind(kind, KINDS), "not-a-choice"),
        Field(
            description=f"How questions are asked and scored: {', '.join(KINDS)}."
            f" {', '.join(HARNESS_KINDS[1:])} are other names of lm_eval."
        ),
    ] = "generate"
    format: Annotated[
        Text,
        Field(
            description=f"Format of the records: {', '.join(FORMATS)}; or the dotted path of your own class. kind=lm_eval: a"
            " task or group of lm-evaluation-harness, such as mmlu; documents, for the perplexity of texts; or winobias."
        ),
    ] = "records"
    format_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the format."""
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    env_name: Text | None = None
    """Key under `env` of the environment that scores sampled answers (kind generate, instructions)."""
    apply_chat_template: Bool = True
    """Render questions with the model's chat template."""
    system_prompt: Text | None = None
    """Text of the system message."""
    num_few_shot: NotNegative = 0
    """Few-shot examples before the question."""
    few_shot_choice: Literal["random", "first"] = "random"
    """random: each question's few-shot examples are drawn with `seed`, as lm-evaluation-harness draws them (its seed is 1234).
    first: the first ones of few_shot_split."""
    few_shot_as_turns: Bool = True
    """With the chat template: few-shot examples are turns. false: all are in the user message."""
    answer_prefix: Text | None = None
    """Beginning of the answer, which the model continues. null: none."""
    num_samples: Positive = 1
    """Answers sampled for each question."""
    temperature: Annotated[Float, Field(ge=0)] = 0.0
    """Sampling temperature. 0: greedy."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    top_k: Positive | None = None
    """Number of most likely tokens to sample from. null: all."""
    max_new_tokens: Positive = 1024
    """Maximum tokens of an answer."""
    stop: list[Annotated[Text, Field(min_length=1)]] = field(default_factory=list)
    """Texts that end an answer. The answer is cut before them."""
    thinking_tokens: Positive | None = None
    """Maximum tokens of thinking. Then thinking_end is inserted, and the model answers with up to max_new_tokens more tokens.
    Only the answer is scored. If the model ends its turn without thinking_end, its whole text is the answer. If no room is left
    after the thinking, the answer is empty. null: no limit."""
    thinking_end: Annotated[Text, Field(min_length=1)] = "</think>"
    """Text that ends the model's thinking."""
    max_turns: Positive = 1
    """Maximum turns of an episode."""
    pass_at: list[Positive] = field(default_factory=list)
    """Values k for which pass@k is reported."""
    judge_prompt_file: Line | None = None
    """kind=comparison, multi_turn_rating, refusal: file of the judge's prompt. null: the kind's default."""
    majority: Bool = False
    """Report the accuracy of the most frequent answer, maj@num_samples. Answers in a tie share the point. Answers that cannot
    be parsed do not vote."""
    metric: Text | None = None
    """Main metric of the task. null: the kind's default."""
    seed: NotNegative = interpolation("${evaluate.seed}")
    """Seed of sampling, of max_samples and of the few-shot examples."""


@dataclass
class LmEvalConfig:
    """Tasks of lm-evaluation-harness (`pip install '.[lm_eval]'`), with the engines as their model."""

    tasks: list[Text] = field(default_factory=list)
    """Tasks and groups of lm-evaluation-harness, such as mmlu; * stands for any text."""
    num_fewshot: NotNegative | None = None
    """Few-shot examples. null: as each task defines."""
    limit: Annotated[Float | None, Field(gt=0)] = None
    """Maximum documents of each task. Below 1: a fraction of them. null: all."""
    include_path: Line | None = None
    """A folder with more tasks, in lm-evaluation-harness's YAML."""
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    """Sampling settings in place of the tasks': until, max_gen_toks, do_sample, temperature, top_p, top_k."""
    max_gen_toks: Positive = 256
    """Maximum tokens of an answer for tasks that define none."""
    apply_chat_template: Bool = False
    """Render prompts with the model's chat template."""
    fewshot_as_multiturn: Bool = True
    """With the chat template: each few-shot example is a turn."""
    system_instruction: Text | None = None
    """With the chat template: the system message. Without: text before the prompt."""
    think_end_token: Text | None = None
    """Text that ends the model's thinking; only what follows is scored."""


@dataclass
class EvaluateConfig:
    """Evaluation of a model on tasks."""

    # Keys that other algorithms have, for code that reads any algorithm's section.
    max_num_steps: ClassVar[int] = 0
    max_num_epochs: ClassVar[int] = UNBOUNDED
    max_rollout_turns: ClassVar[int] = 1
    val_period: ClassVar[int] = 0
    val_at_start: ClassVar[bool] = False
    val_at_end: ClassVar[bool] = False
    max_val_samples: ClassVar[int] = UNBOUNDED
    num_prompts_per_step: ClassVar[int] = 1
    num_generations_per_prompt: ClassVar[int] = 1

    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """Tasks by name."""
    lm_eval: LmEvalConfig = field(default_factory=LmEvalConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    checkpoint: Line | None = None
    """A run's checkpoint whose weights to evaluate. null: the weights of policy.model_name."""
    run: Line | None = None
    """Folder of the run that wrote the checkpoint. null: none."""
    step: Int | None = None
    """Step of the checkpoint, for curves over steps. null: none."""
    seed: NotNegative = 42
    """Default of the tasks' seed, and the seed of random weights."""


class Evaluate(OnlineAlgorithm):
    """Evaluation. It samples and scores, and has no loss."""

    Section = EvaluateConfig
    trains_model = False

    @property
    @override
    def samples_per_step(self) -> int:
        return self.recipe.policy.train_global_batch_size

    @override
    def problems(self) -> Iterator[Problem]:
        if not self.section.tasks and not self.section.lm_eval.tasks:
            yield Problem("evaluate.tasks", "missing-value", "got no tasks; expected at least one. Try suite=NAME")
        for name, task in self.section.tasks.items():
            if task.kind in SAMPLED and task.env_name not in self.recipe.env:
                environments = ", ".join(self.recipe.env) or "none"
                message = f"got {task.env_name}; expected an environment in env that scores the answers: {environments}"
                yield Problem(f"evaluate.tasks.{name}.env_name", "not-a-choice", message)
            yield from _check_format(f"evaluate.tasks.{name}.format", task)
            yield from _check_samples(f"evaluate.tasks.{name}", task)
            yield from _check_unused(f"evaluate.tasks.{name}", task)
        yield from self._name_problems()
        yield from self._judge_problems()
        yield from self._reward_model_problems()

    def _name_problems(self) -> Iterator[Problem]:
        """Yield a problem for each task whose answers would be in a file of lm-evaluation-harness's."""
        harness = self.section.lm_eval.tasks
        if "lm_eval" in self.section.tasks and (
            harness or any(task.kind in HARNESS_KINDS for task in self.section.tasks.values())
        ):
            message = (
                "got a task of this name, which is that of the log of lm-evaluation-harness's requests; expected another name"
            )
            yield Problem("evaluate.tasks.lm_eval", "contradiction", message)
        if twice := sorted(self.section.tasks.keys() & set(harness)):
            message = f"got {', '.join(twice)}, which evaluate.tasks has too; expected each name once"
            yield Problem("evaluate.lm_eval.tasks", "contradiction", message)

    def _judge_problems(self) -> Iterator[Problem]:
        judge, judged = self.section.judge, [name for name, task in self.section.tasks.items() if task.kind in JUDGED]
        if judge.env_name is not None and judge.model_name is not None:
            message = "got env_name and model_name; expected one of them: env_name for an endpoint, or model_name for a model"
            yield Problem("evaluate.judge", "contradiction", message)
        elif judge.env_name is not None:
            environments = {name: environment.kind for name, environment in self.recipe.env.items()}
            if environments.get(judge.env_name) != "llm_judge":
                judges = ", ".join(name for name, kind in environments.items() if kind == "llm_judge") or "none"
                message = f"got {judge.env_name}; expected a key of env of kind llm_judge: {judges}"
                yield Problem("evaluate.judge.env_name", "not-a-choice", message)
        elif judge.model_name is None and judged and not only_scores(self.recipe):
            message = f"got null; expected a model that judges the tasks {', '.join(judged)}, or evaluate.judge.env_name"
            yield Problem("evaluate.judge.model_name", "missing-value", message)

    def _reward_model_problems(self) -> Iterator[Problem]:
        preference = [task.kind == "preference" for task in self.section.tasks.values()]
        if preference and all(preference) and self.section.reward_model.model_name is None:
            message = "got null; expected a reward model, as all tasks are of kind preference. Try ${policy.model_name}"
            yield Problem("evaluate.reward_model.model_name", "missing-value", message)
        if only_scores(self.recipe) and not any(preference):
            message = "got policy.model_name, which then is a reward model; expected a task of kind preference"
            yield Problem("evaluate.reward_model.model_name", "contradiction", message)
        if only_scores(self.recipe) and self.section.checkpoint is not None:
            message = "got a checkpoint of a reward model; expected null. Try its hf/ folder as policy.model_name"
            yield Problem("evaluate.checkpoint", "unsupported", message)


def only_scores(recipe: Recipe) -> bool:
    """Return whether the recipe is an evaluation of a reward model, which generates nothing."""
    return recipe.algorithm == "evaluate" and recipe.evaluate.reward_model.model_name == recipe.policy.model_name


def _check_format(key: str, task: TaskConfig) -> Iterator[Problem]:
    """Yield a problem if a task's format does not exist, or is not one of lm-evaluation-harness though its kind needs that."""
    if task.kind not in HARNESS_KINDS:
        message = not_a_kind(task.format, FORMATS)
    elif task.format == "records" or "." in task.format:
        message = f"got {task.format}; expected a task of lm-evaluation-harness, such as hellaswag, for kind={task.kind}. Try a"
        message += " YAML file of your own task, with its folder as evaluate.lm_eval.include_path"
    else:
        message = None
    if message is not None:
        yield Problem(key, "not-a-choice", message)


def _check_samples(key: str, task: TaskConfig) -> Iterator[Problem]:
    """Yield the problems of metrics that need several different answers to a question."""
    for k in task.pass_at:
        if k > task.num_samples:
            message = f"got {k}; expected at most num_samples={task.num_samples}"
            yield Problem(f"{key}.pass_at", "too-large", message)
    if task.majority and task.num_samples == 1:
        message = "got 1; expected at least 2 with majority=true, which compares several answers"
        yield Problem(f"{key}.num_samples", "too-small", message)
    if task.kind in SAMPLED and task.num_samples > 1 and task.temperature == 0:
        message = f"got 0, with which all num_samples={task.num_samples} answers are equal; expected above 0, or num_samples=1"
        yield Problem(f"{key}.temperature", "contradiction", message)


def _check_unused(key: str, task: TaskConfig) -> Iterator[Problem]:
    """Yield a problem for each key of a task of lm-evaluation-harness that has no effect there."""
    for name in NOT_OF_HARNESS if task.kind in HARNESS_KINDS else ():
        if (value := getattr(task, name)) != getattr(TaskConfig(), name):
            message = f"got {value}, but kind={task.kind} does not read it. Leave it out"
            yield Problem(f"{key}.{name}", "has-no-effect", message)

"""The loop of an evaluation, on rank 0: load the weights, ask each task's questions, write the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.algorithms.evaluate import HARNESS_KINDS, KINDS, TaskConfig
from pipeline.checkpoints import checkpoint, verification
from pipeline.config import Recipe, skipped_tasks
from pipeline.data.chat import load_tokenizer
from pipeline.evaluation import scores
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines, engines_of
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.task import Task
from pipeline.files.storage import RetryPolicy, retrying
from pipeline.files.stored_files import FileKey
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import Deadline
from pipeline.job.startup import SETTING_UP, Startup
from pipeline.job.world import World
from pipeline.recipe import user_code
from pipeline.roles import GenerateRole
from pipeline.rpc import RpcClient, RpcGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.evaluation.lm_eval_tasks import HarnessRun

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two looks for a reason to leave."""
RECORD_S = 10.0
"""Seconds between two records of progress."""


class Leaving(Exception):
    """The evaluation ends before it is complete; another attempt continues it."""


def evaluate(
    recipe: Recipe, attempt: Attempt, retry: RetryPolicy, world: World, client: RpcClient, role: GenerateRole, startup: Startup
) -> bool:
    """Run the evaluation and return whether all tasks are complete.

    False: the time is up or a signal came, and a requeue is requested. retry: how writes into the run folder are retried.
    """
    startup.enter(SETTING_UP)
    timeouts, workers, run_dir = recipe.cluster.timeouts, world.workers, world.info.run_dir
    attempt.claim()
    key = verification.obtain_key(recipe.checkpointing)
    if folder := recipe.evaluate.checkpoint:
        checkpoint.wait_until_seen(Path(folder))
        verification.check_record(checkpoint.read_record(Path(folder)), recipe.checkpointing.verify, key)
    client.leading_role = role
    generate = RpcGroup(client, world, workers.generate, GenerateRole, timeouts, role)
    setup = generate.call(GenerateRole.setup)
    skipped = skipped_tasks(recipe)
    with world.phase("load data", verb="setup"):
        tokenizer = load_tokenizer(recipe.policy.tokenizer)
        configs = {name: config for name, config in recipe.evaluate.tasks.items() if name not in skipped}
        tasks = [build(name, config, recipe, tokenizer) for name, config in configs.items() if config.kind not in HARNESS_KINDS]
        harness = _harness(recipe, tokenizer, skipped)
    setup.result()
    startup.enter("load the weights")
    of_ranks = dict(zip(workers.generate, generate.call(GenerateRole.load).result(), strict=True))
    deadline = Deadline.of_attempt(recipe.checkpointing, run_dir, attempt.folder)
    groups = [
        RpcGroup(client, world, ranks, GenerateRole, timeouts, role if world.rank in ranks else None)
        for ranks in workers.engines
    ]
    asking = [*tasks, *([harness] if harness else [])]
    encrypts = recipe.checkpointing.encryption.enabled
    logs = {task.name: AnswerLog(run_dir, task.name, retry, key, encrypts) for task in asking}
    supervisor = Supervisor(attempt, deadline, list(logs.values()), startup)
    engines = engines_of(recipe, groups, [of_ranks[first] for first, *_ in workers.engines], supervisor)
    for name, reason in skipped.items():
        logger.info(f"task {name} is skipped: {reason}")
    startup.enter("first answers")
    try:
        for task in asking:
            _ask(task, engines, logs[task.name])
            supervisor.record()
    except Leaving as leaving:
        supervisor.record()
        attempt.ask_requeue(str(leaving))
        logger.info(f"leaving: {leaving}")
        return False
    finally:
        if engines.judge:
            engines.judge.close()
    for log in logs.values():
        log.sync()
    task_answers = {task.name: (task, logs[task.name].all()) for task in tasks} | (harness.tasks() if harness else {})
    task_answers = {name: task_answers[name] for name in dict.fromkeys((*configs, *task_answers))}
    _write_scores(recipe, task_answers, skipped, harness, run_dir, retry, key if encrypts else None)
    return True


def _ask(task: Task | HarnessRun, engines: Engines, log: AnswerLog) -> None:
    began, before = time.perf_counter(), (log.added, len(log))
    task.ask(engines, log)
    new, took_s = log.added - before[0], time.perf_counter() - began
    logger.info(f"task {task.name}: {before[1]} answers kept, {new} new in {took_s:.1f} s")


def _write_scores(
    recipe: Recipe,
    task_answers: dict[str, tuple[Task, Sequence[Answer]]],
    skipped: dict[str, str],
    harness: HarnessRun | None,
    run_dir: Path,
    retry: RetryPolicy,
    key: FileKey | None,
) -> None:
    """Write the scores into the run folder and into TensorBoard. key: encrypts lm_eval's answers; None: they stay plain."""
    summary, values = scores.summarize(recipe, task_answers), scores.values(task_answers)
    summary["skipped"] = skipped
    if harness:
        harness.complete(summary)
        retrying(lambda: harness.write(run_dir, key), "writing the results of lm_eval", run_dir, retry)
    retrying(lambda: scores.write(run_dir, summary, values), "writing the scores", run_dir / scores.FILE, retry)
    scores.show(summary)


def build(name: str, config: TaskConfig, recipe: Recipe, tokenizer: object) -> Task:
    """Build the task `name` of the suite. Raises RecipeError for data that cannot be read."""
    return user_code.load(KINDS.get(config.kind, config.kind))(name, config, recipe, tokenizer)


def _harness(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, skipped: Collection[str]) -> HarnessRun | None:
    if not recipe.evaluate.lm_eval.tasks and not any(task.kind in HARNESS_KINDS for task in recipe.evaluate.tasks.values()):
        return None
    from pipeline.evaluation.lm_eval_tasks import HarnessRun  # its package is optional

    return HarnessRun(recipe, tokenizer, skipped)


class Supervisor:
    """Watches the evaluation while engines work: records progress, and raises Leaving if the time is up or a signal came."""

    def __init__(self, attempt: Attempt, deadline: Deadline, logs: Sequence[AnswerLog], startup: Startup) -> None:
        self._attempt, self._deadline, self._logs, self._startup = attempt, deadline, logs, startup
        self._recorded = 0  # answers of this attempt that have a score
        self._looked = self._recorded_at = 0.0

    def __call__(self) -> None:
        """Record progress and raise Leaving if it is time for it. Does so at most every CHECK_S seconds."""
        now = time.monotonic()
        if now - self._looked < CHECK_S:
            return
        self._looked = now
        if now - self._recorded_at > RECORD_S:
            self.record()
            self._recorded_at = now
        if reason := self._deadline.why_end(any(log.added for log in self._logs)):
            raise Leaving(reason)

    def record(self) -> None:
        """Record the number of kept answers if there are newly scored ones. A job that crashes after progress is requeued."""
        if (scored := sum(log.scored for log in self._logs)) == self._recorded:
            return
        self._startup.end()
        for log in self._logs:
            log.sync()
        self._attempt.record_progress(sum(map(len, self._logs)))
        self._recorded = scored

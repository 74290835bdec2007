"""The loop of an evaluation, on rank 0: load the weights, ask each task's questions, write the scores."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from pipeline import user_code
from pipeline.algorithms.evaluate import KINDS, TaskConfig
from pipeline.attempt import Attempt
from pipeline.checkpoint import storage_timeout_s
from pipeline.config import Recipe
from pipeline.data.chat import load_tokenizer
from pipeline.deadline import Deadline
from pipeline.evaluation import scores
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.task import Task
from pipeline.roles import GenerateRole
from pipeline.rpc import RpcClient, RpcGroup
from pipeline.startup import SETTING_UP, Startup
from pipeline.storage import RetryPolicy, retrying
from pipeline.world import World

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""Seconds between two looks for a reason to leave."""
RECORD_S = 10.0
"""Seconds between two records of progress."""


class Leaving(Exception):
    """The evaluation ends before it is complete; another attempt continues it."""


def evaluate(recipe: Recipe, run_dir: Path, world: World, client: RpcClient, role: GenerateRole, startup: Startup) -> bool:
    """Evaluate, and return whether all tasks are complete. False: time is up or a signal came, and a requeue is requested."""
    startup.enter(SETTING_UP)
    timeouts, workers = recipe.cluster.timeouts, world.workers
    storage_s = storage_timeout_s(timeouts)
    attempt = Attempt(world.info.folder, storage_s)
    attempt.claim()
    client.own = role
    generate = RpcGroup(client, world, workers.generate, GenerateRole, timeouts, role)
    ready = generate.setup()
    with world.phase("load data", verb="setup"):
        tokenizer = load_tokenizer(recipe.policy.tokenizer)
        tasks = [build(name, config, recipe, tokenizer) for name, config in recipe.evaluate.tasks.items()]
    ready.result()
    startup.enter("load the weights")
    generate.load().result()
    deadline = Deadline.of_attempt(recipe.checkpointing, run_dir, attempt.folder)
    groups = [
        RpcGroup(client, world, ranks, GenerateRole, timeouts, role if world.rank in ranks else None)
        for ranks in workers.engines
    ]
    retry = RetryPolicy(storage_s, attempt.check)
    logs = {task.name: AnswerLog(run_dir, task.name, retry, attempt.check) for task in tasks}
    engines = Engines.of(recipe, groups, _Supervisor(attempt, deadline, list(logs.values())))
    startup.enter("first answers")
    try:
        for task in tasks:
            before, began = len(logs[task.name]), time.perf_counter()
            task.ask(engines, logs[task.name])
            startup.end()
            asked = len(logs[task.name]) - before
            logger.info("task %s: %d answers kept, %d new in %.1f s", task.name, before, asked, time.perf_counter() - began)
    except Leaving as why:
        attempt.ask_requeue(str(why))
        logger.info("leaving: %s", why)
        return False
    attempt.check()
    summary = scores.summarize(recipe, {task.name: (task, logs[task.name].all()) for task in tasks})
    retrying(lambda: scores.write(run_dir, summary), "writing the scores", run_dir / scores.FILE, retry)
    scores.show(summary)
    return True


def build(name: str, config: TaskConfig, recipe: Recipe, tokenizer: object) -> Task:
    """Return a task of the suite. Raises RecipeError for data that cannot be read."""
    return user_code.load(KINDS.get(config.kind, config.kind))(name, config, recipe, tokenizer)


class _Supervisor:
    """Called while engines work: it records progress, and raises Leaving where time is up or a signal has come."""

    def __init__(self, attempt: Attempt, deadline: Deadline, logs: list[AnswerLog]) -> None:
        self._attempt, self._deadline, self._logs = attempt, deadline, logs
        self._recorded = sum(len(log) for log in logs)
        self._looked = self._recorded_at = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._looked < CHECK_S:
            return
        self._looked = now
        why, answers = self._deadline.why_leave(), sum(len(log) for log in self._logs)
        if answers > self._recorded and (why or now - self._recorded_at > RECORD_S):
            self._attempt.progressed(answers)  # a crash after progress is requeued
            self._recorded, self._recorded_at = answers, now
        if why:
            raise Leaving(why)

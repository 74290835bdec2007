"""The training loops, on rank 0. They read like the papers; `pipeline/roles/` implements the verbs."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from pipeline import config
from pipeline.algorithms.advantages import normalization
from pipeline.algorithms.algorithm import Algorithm, OnlineAlgorithm
from pipeline.algorithms.early_stop import EarlyStop
from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import Checkpoints, version_problem
from pipeline.config import Recipe, RecipeError, only_evaluates
from pipeline.data import epochs
from pipeline.data.batches import split_batch
from pipeline.data.mixture import Mixture
from pipeline.data.preferences import Pair
from pipeline.data.stream import Stream
from pipeline.job.attempt import Attempt
from pipeline.job.deadline import Deadline
from pipeline.job.startup import Startup
from pipeline.monitor.learning import LearningMonitor
from pipeline.monitor.steps import StepMonitor
from pipeline.observe.metrics import Metrics
from pipeline.observe.rank_timeline import Timeline
from pipeline.observe.rollout_metrics import mean_metrics, validation_metrics
from pipeline.refit.colocation import Colocation
from pipeline.rollout.collectors import Collector, Prompts
from pipeline.rpc import RpcGroup
from pipeline.steering.live_changes import Steering
from pipeline.train.background_worker import BackgroundWorker
from pipeline.types import DataParallelRank, Prompt, RolloutGroup, Sample

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")
LEFT_OVER = "data/records_left_over"
"""Metric of the last step of a run that ends with its data: the records that fill no further step."""
DROPPED = "data/records_dropped"
"""Metric of the training records that the run has skipped so far, in all epochs, from the first such step on."""
NO_VARIATION = (
    "The other prompts are too easy or too hard for this policy. Try other data, more epochs or more answers to a prompt"
)


class NothingSaved(RuntimeError):
    """A run without checkpoints had to leave before its end."""


@dataclass
class RunParts:
    """The parts of a run that both loops use."""

    recipe: Recipe
    folder: Path
    checkpoints: Checkpoints
    train: RpcGroup
    places: list[DataParallelRank]  # of the train ranks
    colocation: Colocation
    tokenizer: PreTrainedTokenizerBase
    attempt: Attempt
    deadline: Deadline
    timeline: Timeline
    startup: Startup = field(default_factory=Startup)
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()  # sets rank 0's phase, as `World.phase`
    record: Callable[[], bytes] = bytes  # the rollout buffer's state for a checkpoint
    monitor: StepMonitor | None = None  # None: resources are not sampled
    learning: LearningMonitor | None = None  # None: nobody looks whether steps teach anything
    logging: BackgroundWorker = field(default_factory=BackgroundWorker)  # writes rollouts to files
    left: str | None = None  # why the run left before its end, with everything saved
    stopped: str | None = None  # why the run is complete before its last step
    stop: EarlyStop = field(init=False)
    steering: Steering = field(init=False)
    _unsaved: Callable[[], None] | None = None  # saves the last step; None if it is saved
    _unsettled: Callable[[dict[str, str]], None] | None = None  # completes a save under way, given the digests of its files
    _save_s: float | None = None  # duration of the last save, until it is logged
    _kept: bytes = b""  # the rollout buffer's state in the restored checkpoint
    _warned: set[str] = field(default_factory=set)  # why checkpoints lacked a metric to rank by, each logged once

    def __post_init__(self) -> None:
        self.stop = EarlyStop(self.recipe.algorithm, config.section(self.recipe))
        self.steering = Steering(self.recipe, self.folder, self.train, self.checkpoints.retry)

    def restore(self, stream: Stream | Mixture) -> tuple[int, Metrics]:
        """Load the last complete checkpoint, if there is one. Return its step and the metrics, cut back to it."""
        self.checkpoints.clean()
        latest = self.checkpoints.latest()
        step, changes = (latest.step, latest.state.get("steer", [])) if latest else (0, [])
        self.steering.resume(step, changes, stream)
        if latest is None:
            return 0, self._metrics(None)
        if problem := version_problem(latest, self.recipe):
            raise RecipeError(problem)
        self.startup.enter("read the checkpoint")
        verification.check_record(latest, self.recipe.checkpointing.verify, self.checkpoints.key)
        with self.colocation.training():
            self.train.restore(str(latest.folder)).result()
        self._kept = latest.rollouts(self.checkpoints.key)
        stream.load_state_dict(latest.state["stream"])
        self.stop.load_state_dict(latest.state.get("early_stop", {}))
        logger.info("resumed from %s", latest.folder)
        return latest.step, self._metrics(latest.step)

    def _metrics(self, after_step: int | None) -> Metrics:
        return Metrics(self.folder, self.recipe.logger, after_step, self.checkpoints.retry, self.checkpoints.writing_key)

    def take_kept(self) -> bytes:
        """Return the rollout buffer's state from the restored checkpoint, once."""
        kept, self._kept = self._kept, b""
        return kept

    def learn(self, algorithm: Algorithm, samples: list[Sample], models: Sequence[str]) -> dict[str, float]:
        """Train `models` on the samples of a step and return the metrics, named `train/...` for the policy."""
        train, needs = self.train, algorithm.needs
        if self.monitor:
            self.monitor.learned(samples, models)
        if self.learning:
            self.learning.learned(samples, needs.estimates)
        size = self.recipe.policy.train_global_batch_size
        train.load(parts=split_batch(samples, self.recipe.policy, self.places, size, algorithm.sequences_per_item)).result()
        if needs.old or needs.reference or needs.critic or needs.taught:
            train.forward().result()
        if needs.estimates:
            moments = self.of_data_ranks(train.estimate().result())
            train.standardize(normalization(moments, needs.standardized)).result()
        results = train.step(list(models)).result()[0]
        named = (("train" if model == "policy" else model, of_updates) for model, of_updates in results.items())
        return {key: value for name, of_updates in named for key, value in mean_metrics(name, of_updates).items()}

    def of_data_ranks(self, replies: list[Reply]) -> list[Reply]:
        """Return one reply for each data rank; train ranks that share a data rank reply the same."""
        first = {place.rank: i for i, place in reversed(list(enumerate(self.places)))}
        return [replies[i] for _, i in sorted(first.items())]

    def end_step(
        self,
        metrics: Metrics,
        step: int,
        last: bool,
        position: dict[str, Any],
        values: dict[str, float],
        groups: list[RolloutGroup] | None = None,
    ) -> None:
        """Log a step, and save it when due. position: the data stream's state after this step."""
        if self._save_s is not None:
            values = values | {"time/save": self._save_s}  # of the previous checkpoint
            self._save_s = None
        self.startup.end()
        self.attempt.check()
        if groups is not None:
            self.log_rollouts(metrics, step, groups, "step")
        if self.monitor:
            values = values | self.monitor.step_ended(step, values, groups)
        if self.learning:
            self.learning.step_ended(step, values, groups)
        metrics.log(step, values)
        self.deadline.stepped(values)
        self.settle()
        state = {"stream": position, "early_stop": self.stop.state_dict(), "steer": self.steering.state_dict()}
        self._unsaved = functools.partial(self.save, step, state, values)
        if self.recipe.checkpointing.enabled and (last or step % self.recipe.checkpointing.save_period == 0):
            self._unsaved()

    def log_rollouts(self, metrics: Metrics, step: int, groups: list[RolloutGroup], kind: str) -> None:
        """Write rollouts in a thread, one step after another; all are written before the next checkpoint begins."""
        if metrics.logs_rollouts:
            tokenizer = self._loggers_tokenizer
            self._wait_for_rollouts()
            self.logging.start(lambda: metrics.log_rollouts(step, groups, tokenizer, kind))

    def _wait_for_rollouts(self) -> None:
        """Wait until the thread has written all rollouts. Raises TimeoutError after cluster.timeouts.save."""
        with self.phase("write rollouts"):
            limit_s = self.recipe.cluster.timeouts.save
            if not self.logging.wait(limit_s):
                raise TimeoutError(
                    f"verb 'coordinate', phase 'write rollouts': not done after {limit_s:g} s (cluster.timeouts.save), on rank"
                    f" 0 (train), which writes into {self.folder}/rollouts"
                )

    @functools.cached_property
    def _loggers_tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy for the thread: a tokenizer used by two threads at once raises "Already borrowed"."""
        return copy.deepcopy(self.tokenizer)

    def must_leave(self) -> bool:
        """Return, between two steps, whether to leave the run now. If so, the last step has been saved.

        Raises NothingSaved if it cannot be saved.
        """
        why = self.deadline.why_leave()
        if why is None:
            return False
        if not self.recipe.checkpointing.enabled:
            raise NothingSaved(f"{why}: the run ends without having saved anything, because checkpointing.enabled is false")
        if self._unsaved:
            self._unsaved()
        self.settle(wait=True)
        self.attempt.ask_requeue(why)
        self.left = why
        logger.info("leaving: %s", why)
        return True

    def validate_first(self, metrics: Metrics, validate: Callable[[], dict[str, float]]) -> None:
        """Validate before the first step, and log it as step 0."""
        self.startup.enter("validation")
        metrics.log(0, validate() | metrics.take_clocks())

    def evaluate_alone(self, metrics: Metrics, step: int, validate: Callable[[], dict[str, float]]) -> int:
        """Validate once, log it under the step of these weights, and return that step. Nothing is trained or saved."""
        self.startup.enter("validation")
        metrics.take_clocks()  # a refit before it belongs to no step
        metrics.log_again(step, validate() | metrics.take_clocks())
        self.timeline.step_ended(step)
        self.startup.end()
        self._wait_for_rollouts()
        metrics.close()
        return step

    def validated(self, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a validation, after the early stop has read them. Raises RecipeError if it misses its own."""
        self.stop.validated(values)
        return values

    def data_ended(self, step: int, left_over: int, data: Stream | Mixture) -> dict[str, float]:
        """Log that the data have ended after a step, and return metrics of the records that no step uses.

        Raises RecipeError if there was no step at all.
        """
        supply = epochs.of_taken(self.recipe, left_over)
        if step == 0 and (problem := supply.problem()):
            raise RecipeError(problem)
        what = "the data end after step %d; the last %d records fill no step of %d and are not used"
        logger.info(what, step, left_over, supply.per_step)
        return ({LEFT_OVER: float(left_over)} if left_over else {}) | dropped_records(data)

    def step_not_full(self, step: int, groups: int, wanted: int) -> None:
        """Log that the data have ended within a step, after `step` others. Raises RecipeError if there was no other."""
        what = f"the data end before step {step + 1} is full: only {groups} of {wanted} groups have rewards that vary"
        if step == 0:
            raise RecipeError(config.Problem("data", "too-few-records", f"{what}. {NO_VARIATION}"))
        logger.info("%s, and they are not used", what)

    def finish(self, step: int) -> None:
        """Save the last step, if it is not saved: the data may end before a due save."""
        if not self.left and step < config.section(self.recipe).max_num_steps and self.stop.reason:
            self.stopped = self.stop.reason
            logger.info("the run stops early: %s", self.stopped)
        if self._unsaved and self.recipe.checkpointing.enabled:
            self._unsaved()
        self.settle(wait=True)
        self._wait_for_rollouts()
        if not self.left:
            self.steering.run_ended(step)

    def save(self, step: int, state: dict[str, Any], values: dict[str, float]) -> None:
        """Write a checkpoint on all ranks. With checkpointing.async_save, `settle` completes it later."""
        self.settle(wait=True)
        self._wait_for_rollouts()
        config, start = self.recipe.checkpointing, time.perf_counter()
        self.attempt.check()
        partial = self.checkpoints.begin(step)
        with self.checkpoints.discarding(), self.colocation.training():
            self.checkpoints.keep_rollouts(partial, self.record())
            self.train.save(str(partial)).result()
            exported = self.train.export(str(partial / "hf")).result()[0] if config.save_consolidated else {}
        metric = self._ranking_metric(step, values)

        def commit(written: dict[str, str]) -> None:
            self.attempt.check()
            self.checkpoints.commit(partial, step, metric, state, written | exported)
            self.attempt.progressed(step)
            self._save_s = time.perf_counter() - start
            self.deadline.saved(self._save_s)

        self._unsaved, self._unsettled = None, commit
        self.settle(wait=not config.async_save)

    def _ranking_metric(self, step: int, values: dict[str, float]) -> float | None:
        """Return the metric that ranks the checkpoint of a step; None if its metrics lack it, with a warning the first time."""
        if not (name := self.recipe.checkpointing.metric_name):
            return None
        key = name.replace(":", "/", 1)
        validated = not key.startswith("val/") or any(each.startswith("val/") for each in values)
        why = "" if validated else ", which was not validated,"
        if key not in values and why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "checkpointing.metric_name: got %s, but the metrics of step %d%s have no %s, so its checkpoint ranks last."
                " There are: %s", name, step, why, key, ", ".join(sorted(values))
            )  # fmt: skip
        return values.get(key)

    def settle(self, wait: bool = False) -> None:
        """Complete the checkpoint under way if all ranks have written it. wait: until they have."""
        if self._unsettled:
            with self.checkpoints.discarding():
                written = self.train.written(wait).result()
            if None not in written:
                self._unsettled({name: digest for of_rank in written for name, digest in of_rank.items()})
                self._unsettled = None


def run_online(
    run: RunParts, algorithm: OnlineAlgorithm, collector: Collector, prompts: Prompts, validation: list[Prompt]
) -> int:
    """Train on rollouts: sample, score, update, refit. Return the last step."""
    section, colocation = config.section(run.recipe), run.colocation
    assert isinstance(section, config.OnlineConfig)
    run.record = collector.state_dict
    step, metrics = run.restore(prompts)

    def refit() -> dict[str, float]:
        with metrics.clock("refit"):
            collector.before_refit()
            return colocation.refit(version=step)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"), colocation.generating():
            groups = collector.validate(validation)
        run.attempt.check()
        run.log_rollouts(metrics, step, groups, "val")
        return run.validated(validation_metrics(groups))

    run.startup.enter("first refit")
    refit()
    if only_evaluates(run.recipe):  # the checkpoint keeps its rollouts
        return run.evaluate_alone(metrics, step, validate)
    resumed = collector.load_state_dict(run.take_kept(), step)
    metrics.take_clocks()  # the first refit belongs to no step
    run.timeline.step_ended(step)
    if section.val_at_start and step == 0 and validation:
        run.validate_first(metrics, validate)
    run.startup.enter("first step")
    batch = prompts.take(collector.num_prompts_to_send(step))
    if step == 0 and not collector.can_fill_step(batch):
        run.data_ended(step, len(batch), prompts)
    while step < section.max_num_steps and not run.stop.reason and collector.can_fill_step(batch) and not run.must_leave():
        with metrics.clock("step"):
            with metrics.clock("rollout"), colocation.generating():
                collector.send(batch, step)
                groups, values = collector.collect(prompts, algorithm.select, step)
            if len(groups) < section.num_prompts_per_step:
                run.step_not_full(step, len(groups), section.num_prompts_per_step)
                break
            samples = algorithm.compute_advantages(groups)
            with metrics.clock("train"), colocation.training():
                values |= run.learn(algorithm, samples, algorithm.trains(step))
            step += 1
            cost = refit()
        values |= run.steering.step_ended(step, prompts) | dropped_records(prompts)
        position, batch = prompts.state_dict(), prompts.take(collector.num_prompts_to_send(step))
        ended = step < section.max_num_steps and not collector.can_fill_step(batch)
        last = step >= section.max_num_steps or ended
        if validation and _validates(section, step, last):
            values |= validate()
        tokens = sum(rollout.drawn_tokens for group in groups for rollout in group.rollouts)
        clocks = metrics.take_clocks()
        values |= cost | clocks | {"throughput/tokens_per_s": tokens / clocks["time/step"]}
        values |= run.timeline.step_ended(step) | resumed
        values |= run.data_ended(step, len(batch) + collector.pending, prompts) if ended else {}
        resumed = {}
        run.end_step(metrics, step, last or bool(run.stop.reason), position, values, groups)
    run.finish(step)
    metrics.close()
    if collector.pending and not run.left:
        logger.info("the run ends; no step has trained on %d groups that were sampled ahead", collector.pending)
    return step


def run_offline(run: RunParts, algorithm: Algorithm, examples: Stream | Mixture, validation: Sequence[Sample | Pair]) -> int:
    """Train on a dataset. Return the last step."""
    recipe, section, train = run.recipe, config.section(run.recipe), run.train
    together = algorithm.sequences_per_item
    step, metrics = run.restore(examples)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"):
            updates = split_batch(_flat(validation), recipe.policy, run.places, len(validation), together)
            parts = [update for (update,) in updates]
            shares = run.of_data_ranks(train.evaluate(parts=parts).result())
        return run.validated({f"val/{name}": sum(share[name] for share in shares) for name in shares[0]})

    if only_evaluates(recipe):
        return run.evaluate_alone(metrics, step, validate)
    run.timeline.step_ended(step)
    if section.val_at_start and step == 0 and validation:
        run.validate_first(metrics, validate)
    run.startup.enter("first step")
    size = recipe.policy.train_global_batch_size
    items = examples.take(size)
    if step == 0 and len(items) < size:
        run.data_ended(step, len(items), examples)
    while step < section.max_num_steps and not run.stop.reason and len(items) == size and not run.must_leave():
        samples = _flat(items)
        with metrics.clock("step"), metrics.clock("train"):
            values = run.learn(algorithm, samples, ["policy"])
        step += 1
        tokens = sum(len(sample.tokens) for sample in samples)
        values |= run.steering.step_ended(step, examples) | dropped_records(examples)
        position, items = examples.state_dict(), examples.take(size)
        ended = step < section.max_num_steps and len(items) < size
        last = step >= section.max_num_steps or ended
        if validation and (_due(section.val_period, step) or (section.val_at_end and last)):
            values |= validate()
        clocks = metrics.take_clocks()
        values |= clocks | {"throughput/tokens_per_s": tokens / clocks["time/step"]} | run.timeline.step_ended(step)
        values |= run.data_ended(step, len(items), examples) if ended else {}
        run.end_step(metrics, step, last or bool(run.stop.reason), position, values)
    run.finish(step)
    metrics.close()
    return step


def dropped_records(data: Stream | Mixture) -> dict[str, float]:
    """Return the metric of the records that the data have skipped up to their position; none if there are none."""
    return {DROPPED: float(data.dropped)} if data.dropped else {}


def _flat(items: Sequence[Sample | Pair]) -> list[Sample]:
    return [sample for item in items for sample in (item if isinstance(item, tuple) else (item,))]


def _validates(section: config.OnlineConfig, step: int, last: bool) -> bool:
    """Return whether to validate after a step. last: whether it is the run's last one."""
    return (_due(section.val_period, step) and step >= section.val_start_at) or (section.val_at_end and last)


def _due(period: int, step: int) -> bool:
    return period > 0 and step % period == 0

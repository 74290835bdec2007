"""The training loops, on rank 0. `roles/` implements the verbs; `coordination/` has rollouts, refits, saving and logging."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeVar

from pipeline import config
from pipeline.algorithms.algorithm import Algorithm, OnlineAlgorithm
from pipeline.algorithms.token_advantages import normalization
from pipeline.config import only_evaluates
from pipeline.coordination.collectors import Collector, Prompts
from pipeline.coordination.run_progress import data_metrics
from pipeline.coordination.training_run import TrainingRun
from pipeline.data.batches import split_batch
from pipeline.data.mixture import Mixture
from pipeline.data.preferences import Pair
from pipeline.data.stream import Stream
from pipeline.observe.rollout_metrics import mean_metrics, validation_metrics
from pipeline.roles import TrainRole
from pipeline.types import DataParallelRank, Prompt, Sample

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")


def run_online(
    run: TrainingRun, algorithm: OnlineAlgorithm, collector: Collector, prompts: Prompts, validation: list[Prompt]
) -> int:
    """Train on rollouts: sample, score, update, refit. Return the last step."""
    section, colocation, progress = config.section(run.recipe), run.colocation, run.progress
    assert isinstance(section, config.OnlineConfig)
    run.saver.rollouts = collector.state_dict
    step, metrics = run.restore(prompts)

    def refit() -> dict[str, float]:
        with metrics.clock("refit"):
            collector.before_refit()
            return colocation.refit(version=step)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"), colocation.generating():
            groups = collector.validate(validation, step)
        run.attempt.check()
        run.logger.write_rollouts(step, groups, "val")
        return progress.note_validation(validation_metrics(groups))

    run.startup.enter("first refit")
    refit()
    if only_evaluates(run.recipe):  # the checkpoint keeps its rollouts
        return run.evaluate_alone(step, validate)
    resumed = collector.load_state_dict(run.saver.take_rollouts(), step)
    metrics.take_clocks()  # the first refit belongs to no step
    run.begin(step, validate if validation else None)
    batch = prompts.take(collector.num_prompts_to_send(step))
    if step == 0 and not collector.can_fill_step(batch):
        progress.data_ended(step, len(batch))
    while progress.goes_on(step) and collector.can_fill_step(batch) and not progress.must_leave():
        with metrics.clock("step"):
            with metrics.clock("rollout"), colocation.generating():
                collector.send(batch, step)
                groups, values = collector.collect(prompts, algorithm.select, step)
            if len(groups) < section.num_prompts_per_step:
                progress.step_not_full(step, len(groups), section.num_prompts_per_step)
                break
            samples, aligned = run.teacher_samples.write(groups, algorithm.compute_advantages(groups))
            values |= aligned
            with metrics.clock("train"), colocation.training():
                values |= learn(run, algorithm, samples, algorithm.trains(step))
            step += 1
            values |= refit() | resumed
        resumed = {}
        values |= run.steering.step_ended(step, prompts) | data_metrics(prompts)
        position, batch = prompts.state_dict(), prompts.take(collector.num_prompts_to_send(step))
        left_over = None if collector.can_fill_step(batch) else len(batch) + collector.pending
        tokens = sum(rollout.drawn_tokens for group in groups for rollout in group.rollouts)
        run.end_step(step, values, tokens, position, left_over, groups)
    run.finish(step)
    if collector.pending and not progress.left:
        logger.info("the run ends; no step has trained on %d groups that were sampled ahead", collector.pending)
    return step


def run_offline(run: TrainingRun, algorithm: Algorithm, examples: Stream | Mixture, validation: Sequence[Sample | Pair]) -> int:
    """Train on a dataset. Return the last step."""
    progress, size = run.progress, run.recipe.policy.train_global_batch_size
    step, metrics = run.restore(examples)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"):
            policy, together = run.recipe.policy, algorithm.sequences_per_item
            measure_kl(run, algorithm, _flat(validation))
            updates = split_batch(_flat(validation), policy, run.data_ranks, len(validation), together)
            parts = [update for (update,) in updates]
            shares = _of_data_ranks(run.data_ranks, run.train.scatter(TrainRole.evaluate, parts).result())
        return progress.note_validation({f"val/{name}": sum(share[name] for share in shares) for name in shares[0]})

    if only_evaluates(run.recipe):
        return run.evaluate_alone(step, validate)
    run.begin(step, validate if validation else None)
    items = examples.take(size)
    if step == 0 and len(items) < size:
        progress.data_ended(step, len(items))
    while progress.goes_on(step) and len(items) == size and not progress.must_leave():
        samples = _flat(items)
        with metrics.clock("step"), metrics.clock("train"):
            values = learn(run, algorithm, samples, ["policy"])
        step += 1
        values |= run.steering.step_ended(step, examples) | data_metrics(examples)
        position, items = examples.state_dict(), examples.take(size)
        left_over = None if len(items) == size else len(items)
        tokens = sum(len(sample.tokens) for sample in samples)
        run.end_step(step, values, tokens, position, left_over)
    run.finish(step)
    return step


def learn(run: TrainingRun, algorithm: Algorithm, samples: list[Sample], models: Sequence[str]) -> dict[str, float]:
    """Train `models` on the samples of a step and return the metrics, named `train/...` for the policy."""
    train, needs, policy = run.train, algorithm.needs, run.recipe.policy
    run.logger.note_learning(samples, models, needs.estimates)
    measure_kl(run, algorithm, samples)
    parts = split_batch(samples, policy, run.data_ranks, policy.train_global_batch_size, algorithm.sequences_per_item)
    train.scatter(TrainRole.load, parts).result()
    if needs.old or needs.reference or needs.critic or needs.has_teachers:
        train.call(TrainRole.forward).result()
    if needs.estimates:
        moments = _of_data_ranks(run.data_ranks, train.call(TrainRole.estimate).result())
        train.call(TrainRole.standardize, normalization(moments, needs.standardized)).result()
    values: dict[str, float] = {}
    if needs.top_entropy < 1:
        thresholds = train.call(TrainRole.keep_high_entropy).result()[0]
        values = mean_metrics("train", [{"entropy_threshold": threshold} for threshold in thresholds])
    for model, of_updates in train.call(TrainRole.step, list(models)).result()[0].items():
        values |= mean_metrics("train" if model == "policy" else model, of_updates)
    return values


def measure_kl(run: TrainingRun, algorithm: Algorithm, samples: list[Sample]) -> None:
    """Give the train ranks the mean KL, at least 0, of the samples' mismatched answers, if the algorithm needs it."""
    if not algorithm.needs.mismatched:
        return
    parts = split_batch(algorithm.mismatched(samples), run.recipe.policy, run.data_ranks, len(samples))
    sums = _of_data_ranks(run.data_ranks, run.train.scatter(TrainRole.measure_kl, parts).result())
    run.train.call(TrainRole.set_mean_kl, max(0.0, sum(sums) / len(samples))).result()


def _of_data_ranks(data_ranks: Sequence[DataParallelRank], replies: Sequence[Reply]) -> list[Reply]:
    """Return one reply for each data-parallel rank; the replies of train ranks that share a data-parallel rank are equal."""
    first = {data_rank.rank: i for i, data_rank in reversed(list(enumerate(data_ranks)))}
    return [replies[i] for _, i in sorted(first.items())]


def _flat(items: Sequence[Sample | Pair]) -> list[Sample]:
    return [sample for item in items for sample in (item if isinstance(item, tuple) else (item,))]

"""The loops, on rank 0. They read like the papers; what a verb does is in `pipeline/roles.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.algorithms.base import OnlineAlgorithm
from pipeline.checkpoint import Checkpoint, Checkpoints
from pipeline.config import GenerationConfig, Recipe
from pipeline.data.batches import share
from pipeline.data.stream import ExampleStream, PromptStream
from pipeline.metrics import Metrics, mean_metrics, rollout_metrics
from pipeline.refit.coordination import Refits
from pipeline.remote import Remote
from pipeline.rollout import RolloutWork
from pipeline.types import DataPlace, Prompt, RolloutGroup, Sample, Sampling
from pipeline.world import Realms


@dataclass
class Run:
    """What both loops use."""

    recipe: Recipe
    folder: Path
    checkpoints: Checkpoints
    train: Remote
    places: list[DataPlace]  # of the train ranks
    tokenizer: PreTrainedTokenizerBase
    _unsettled: Callable[[], Checkpoint] | None = None  # commits a save that may still be under way

    def restore(self, stream: PromptStream | ExampleStream) -> tuple[int, Metrics]:
        """Go on from the last complete checkpoint, if there is one: the step, and the metrics cut back to it."""
        self.checkpoints.clean()
        latest = self.checkpoints.latest()
        if latest is None:
            return 0, Metrics(self.folder, self.recipe.logger, after_step=None)
        self.train.restore(str(latest.folder)).result()
        stream.load_state_dict(latest.state["stream"])
        print(f"resumed from {latest.folder}", flush=True)
        return latest.step, Metrics(self.folder, self.recipe.logger, after_step=latest.step)

    def save(self, step: int, position: dict[str, Any], values: dict[str, float]) -> None:
        """`position`: the data stream's, after this step. With checkpointing.async_save, `settle` makes it a checkpoint."""
        self.settle(wait=True)
        config = self.recipe.checkpointing
        partial = self.checkpoints.begin(step)
        self.train.save(str(partial)).result()
        if config.save_consolidated:
            self.train.export(str(partial / "hf")).result()
        metric = values.get(config.metric_name.replace(":", "/", 1)) if config.metric_name else None
        self._unsettled = functools.partial(self.checkpoints.commit, partial, step, metric, {"stream": position})
        self.settle(wait=not config.async_save)

    def settle(self, wait: bool = False) -> None:
        """Make a checkpoint of what all ranks have written, if they have."""
        if self._unsettled and all(self.train.written(wait).result()):
            self._unsettled()
            self._unsettled = None

    def saves(self, step: int, last: bool) -> bool:
        return self.recipe.checkpointing.enabled and (last or step % self.recipe.checkpointing.save_period == 0)


def run_online(
    run: Run,
    algorithm: OnlineAlgorithm,
    generate: Remote,
    refits: Refits,
    realms: Realms,
    prompts: PromptStream,
    validation: list[Prompt],
) -> int:
    """Sample, judge, learn, refit; the step it ended at."""
    recipe, grpo, train = run.recipe, run.recipe.grpo, run.train
    step, metrics = run.restore(prompts)

    def refit() -> dict[str, float]:
        with metrics.clock("refit"):
            return refits(version=step)

    def rollout(batch: list[Prompt], samples: int, purpose: str, sampling: Sampling) -> list[RolloutGroup]:
        engines = len(realms.engines)
        work = [RolloutWork(batch[i::engines], samples, purpose, grpo.seed, sampling) for i in range(engines)]
        return _rollout(generate, realms, work)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"):
            groups = rollout(validation, 1, "val", _sampling(recipe.policy.generation, validation=True))
        metrics.log_rollouts(step, groups, run.tokenizer, kind="val")
        return rollout_metrics("val", groups)

    refit()
    metrics.take_clocks()  # that refit belongs to no step
    if grpo.val_at_start and step == 0 and validation:
        metrics.log(0, validate() | metrics.take_clocks())
    batch = prompts.take(grpo.num_prompts_per_step)
    while step < grpo.max_num_steps and len(batch) == grpo.num_prompts_per_step:
        with metrics.clock("step"):
            with metrics.clock("rollout"):
                groups = rollout(batch, grpo.num_generations_per_prompt, f"train/{step}", _sampling(recipe.policy.generation))
            samples = algorithm.credit(groups)
            with metrics.clock("train"):
                train.load(parts=share(samples, recipe.policy, run.places, recipe.policy.train_global_batch_size)).result()
                if algorithm.needs.old or algorithm.needs.reference:
                    train.forward().result()
                results = train.step().result()[0]
            step += 1
            cost = refit()
        position, batch = prompts.state_dict(), prompts.take(grpo.num_prompts_per_step)
        last = step == grpo.max_num_steps or len(batch) < grpo.num_prompts_per_step
        values = mean_metrics("train", results) | rollout_metrics("train", groups)
        if validation and (_due(grpo.val_period, step) or (grpo.val_at_end and last)):
            values |= validate()
        tokens = sum(len(rollout.completion.tokens) for group in groups for rollout in group.rollouts)
        clocks = metrics.take_clocks()
        metrics.log_rollouts(step, groups, run.tokenizer)
        metrics.log(step, values | cost | clocks | {"throughput/tokens_per_s": tokens / clocks["time/step"]})
        run.settle()
        if run.saves(step, last):
            run.save(step, position, values)
    run.settle(wait=True)
    metrics.close()
    return step


def _rollout(generate: Remote, realms: Realms, work: list[RolloutWork]) -> list[RolloutGroup]:
    """Each engine does its part of `work`; the groups, in the order in which the prompts were dealt out."""
    engines = len(realms.engines)
    parts = [work[realms.engines.index(realms.engine(rank))] for rank in realms.generate]
    replies = generate.rollout(parts=parts).result()
    shares = [reply for rank, reply in zip(realms.generate, replies, strict=True) if rank == realms.engine(rank)[0]]
    return [shares[i % engines][i // engines] for i in range(sum(map(len, shares)))]


def run_offline(run: Run, examples: ExampleStream, validation: list[Sample]) -> int:
    """Learn from examples; the step it ended at."""
    recipe, sft, train = run.recipe, run.recipe.sft, run.train
    step, metrics = run.restore(examples)

    def validate() -> dict[str, float]:
        with metrics.clock("validation"):
            parts = [updates[0] for updates in share(validation, recipe.policy, run.places, len(validation))]
            shares = train.evaluate(parts=parts).result()
        first = {place.rank: i for i, place in reversed(list(enumerate(run.places)))}  # one rank for each data rank
        return {"val/loss": sum(shares[i] for i in first.values())}

    if sft.val_at_start and step == 0 and validation:
        metrics.log(0, validate() | metrics.take_clocks())
    size = recipe.policy.train_global_batch_size
    samples = examples.take(size)
    while step < sft.max_num_steps and len(samples) == size:
        with metrics.clock("step"), metrics.clock("train"):
            train.load(parts=share(samples, recipe.policy, run.places, size)).result()
            results = train.step().result()[0]
        step += 1
        tokens = sum(len(sample.tokens) for sample in samples)
        position, samples = examples.state_dict(), examples.take(size)
        last = step == sft.max_num_steps or len(samples) < size
        values = mean_metrics("train", results)
        if validation and (_due(sft.val_period, step) or (sft.val_at_end and last)):
            values |= validate()
        clocks = metrics.take_clocks()
        metrics.log(step, values | clocks | {"throughput/tokens_per_s": tokens / clocks["time/step"]})
        run.settle()
        if run.saves(step, last):
            run.save(step, position, values)
    run.settle(wait=True)
    metrics.close()
    return step


def _due(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


def _sampling(generation: GenerationConfig, validation: bool = False) -> Sampling:
    return Sampling(
        temperature=generation.val_temperature if validation else generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k or 0,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(generation.stop_token_ids or ()),
    )

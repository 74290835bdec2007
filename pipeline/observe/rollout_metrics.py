"""Combine the metrics of a step's updates, and compute metrics of its rollouts: means, accuracy, pass@k."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.types import REWARD

if TYPE_CHECKING:
    from pipeline.types import Rollout, RolloutGroup


def mean_metrics(prefix: str, results: list[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: the maximum for names in `_max`, the minimum for `_min`, else the mean."""

    def combine(name: str) -> float:
        values = [result[name] for result in results]
        if name.endswith("_max"):
            return max(values)
        return min(values) if name.endswith("_min") else sum(values) / len(values)

    return {f"{prefix}/{name}": combine(name) for name in results[0]}


def rollout_metrics(prefix: str, groups: list[RolloutGroup]) -> dict[str, float]:
    """Return the number of episodes without a score, and means over the episodes with one (NaN if there are none).

    The means are of the reward, the share of answers that broke the reward function, the length in sampled tokens, the number
    of turns, the share of answers cut for length, the shares of malformed and of truncated turns (if episodes have several),
    the share of tokens without recorded experts (with policy.router_replay), and each metric of the environment. Each of
    several rewards, `reward/NAME`, also has its unbiased standard deviation, `reward_std/NAME`. An answer that broke the reward
    function has no metrics; it counts as 0 in `accuracy`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    judged = [rollout for rollout in rollouts if not rollout.failure]
    lengths, turns = [rollout.drawn_tokens for rollout in judged], [rollout.answers for rollout in judged]
    values = {
        "reward": _mean([rollout.reward for rollout in judged]),
        "completion_tokens": _mean(lengths),
        "completion_tokens_max": float(max(lengths, default=math.nan)),
        "truncated": _mean([float(rollout.finish == "length") for rollout in judged]),
        "turns": _mean(turns),
        "turns_max": float(max(turns, default=math.nan)),
        **_shares_of_turns(judged),
        "broke_judge": _mean([float(bool(rollout.broke)) for rollout in judged]),
        "env_failures": float(sum(rollout.has_failed for rollout in rollouts)),
    }
    completions = [turn.completion for rollout in judged for turn in rollout.all_turns]
    if any(completion.experts is not None for completion in completions):
        unrouted = sum(len(completion.tokens) for completion in completions if completion.experts is None)
        values["unrouted_tokens"] = unrouted / sum(lengths)
    for name in sorted({name for rollout in judged for name in rollout.metrics}):
        values[name] = _mean(found := [rollout.metrics[name] for rollout in judged if name in rollout.metrics])
        if name.startswith(REWARD):
            values[f"reward_std/{name.removeprefix(REWARD)}"] = statistics.stdev(found) if len(found) > 1 else math.nan
    if "accuracy" in values:
        environments = {
            group.prompt.environment for group in groups if any("accuracy" in rollout.metrics for rollout in group.rollouts)
        }
        scoring = [group for group in groups if group.prompt.environment in environments]
        scored = [rollout for group in scoring for rollout in group.rollouts if not rollout.failure]
        accuracies = [rollout.metrics.get("accuracy", 0.0 if rollout.broke else None) for rollout in scored]
        values["accuracy"] = _mean([value for value in accuracies if value is not None])
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _shares_of_turns(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the shares of malformed and of truncated turns, without those of thoughts; {} if no episode has several turns."""
    if all(rollout.answers < 2 for rollout in rollouts):
        return {}
    turns = [turn for rollout in rollouts for turn in rollout.judged_turns]
    return {
        "malformed_turns": _mean([float(turn.malformed) for turn in turns]),
        "truncated_turns": _mean([float(turn.completion.finish == "length") for turn in turns]),
    }


def validation_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """Return the metrics `val/...`: `rollout_metrics`, and pass@k for k = 1, 2, 4 ... up to the number of answers per prompt.

    If prompts come from several datasets, there are also `val/DATASET/...` for each dataset.
    """
    names = dict.fromkeys(group.prompt.dataset for group in groups)
    parts = {"val": groups}
    if len(names) > 1:
        parts |= {f"val/{name}": [group for group in groups if group.prompt.dataset == name] for name in names}
    return {key: value for prefix, part in parts.items() for key, value in _with_pass_at_k(prefix, part).items()}


def _with_pass_at_k(prefix: str, groups: list[RolloutGroup]) -> dict[str, float]:
    """Return `rollout_metrics` and pass@k. Prompts scored by a reward model have no pass@k: no score means right or wrong."""
    values = rollout_metrics(prefix, groups)
    groups = [group for group in groups if not any("reward_model_score" in rollout.metrics for rollout in group.rollouts)]
    if not groups:
        return values
    most = max(len(group.rollouts) for group in groups)
    counted = [[is_right(rollout) for rollout in group.rollouts if not rollout.failure] for group in groups]
    for k in [*(2**i for i in range(most.bit_length()) if 2**i < most), most]:
        values[f"{prefix}/pass@{k}"] = _mean([pass_at_k(len(right), sum(right), k) for right in counted if len(right) >= k])
    return values


def is_right(rollout: Rollout) -> bool:
    """Return whether an answer is right: `accuracy`, or else the reward, is at least 1."""
    return rollout.metrics.get("accuracy", rollout.reward) >= 1


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k answers is right, from n >= k answers, c right.

    1 - C(n - c, k) / C(n, k)       https://arxiv.org/abs/2107.03374 eq. 1
    """
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

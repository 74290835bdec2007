"""Give sequences their scores: a frozen reward model, on the train ranks or on ranks of its own.

A score is the value head's number on the state after a sequence's last token. Which sequences, and in which microbatches, rank
0 decides (`pipeline/scoring.py`). Leaves out: scores of single steps, and reward models that are not sequence classifiers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from pipeline import config, train
from pipeline.config import PolicyConfig, Recipe
from pipeline.data.packing import pack
from pipeline.rpc import verb
from pipeline.train.base import ModelRole
from pipeline.types import DataParallelRank, Sample
from pipeline.world import World


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """One data rank's share of what is to be scored. All data ranks have equally many microbatches; some may be empty."""

    microbatches: list[list[np.ndarray]]  # of sequences, each [L] int32


class Scorer:
    """This rank's part of the reward model."""

    def __init__(self, model: PolicyConfig, group: dist.ProcessGroup, seed: int, offload: bool):
        """model: `config.reward_model_policy(recipe)`. group: the ranks that serve it, the default group.

        Collective. Raises ValueError, which says what is wrong, if the model or the layout is not supported.
        """
        try:
            self._backend = train.build(model, group, seed, ModelRole(head="values", trained=False, offload=offload))
        except ValueError as error:  # it speaks of policy.*, as which every model is described
            raise ValueError(f"of the reward model: {error}") from error
        self.place = DataParallelRank(self._backend.data_rank, self._backend.data_size)

    def score(self, work: ScoreWork) -> list[float]:
        """Return the score of each sequence, in the order of the microbatches. Collective over the group."""
        batches = [pack([_sample(tokens) for tokens in each], self._backend.device) for each in work.microbatches]
        scores: list[float] = []
        for sequences, batch, outputs in zip(work.microbatches, batches, self._backend.forward(batches), strict=True):
            ends = outputs.values[batch.cu_seqlens[1:].long() - 1].tolist()
            scores += ends[: len(sequences)]  # an empty microbatch has a token all the same
        return scores


class RewardRole:
    """Holds the reward model, on ranks of its own."""

    def __init__(self, recipe: Recipe, seed: int, world: World):
        self._recipe = recipe
        self._seed = seed
        self._world = world

    @verb("setup")
    def setup(self) -> DataParallelRank:
        with self._world.phase("load reward model"):
            self._scorer = Scorer(config.reward_model_policy(self._recipe), self._world.own, self._seed, offload=False)
        return self._scorer.place

    @verb("rollout")
    def score(self, work: ScoreWork) -> list[float]:
        with self._world.phase("score"):
            return self._scorer.score(work)


def _sample(tokens: np.ndarray) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.zeros(len(tokens), bool), logprobs=zeros, advantages=zeros)

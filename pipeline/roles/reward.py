"""Score sequences with a frozen reward model, on the train ranks or on ranks of its own.

A score is the value head's output after a sequence's last token. Rank 0 chooses the sequences and microbatches
(`pipeline/coordination/scoring.py`). Not supported: scores of single steps; reward models that are not sequence classifiers.
"""

from __future__ import annotations

import numpy as np

from pipeline import config, train
from pipeline.config import PolicyConfig, Recipe
from pipeline.config.determinism import named_operators
from pipeline.data.packing import pack
from pipeline.job.world import World
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.rpc import verb
from pipeline.train.train_backend import ModelRole
from pipeline.types import DataParallelRank, Sample


class Scorer:
    """This rank's part of the reward model."""

    def __init__(self, model: PolicyConfig, world: World, seed: int, offload: bool):
        """Build the reward model. Collective over the component's group.

        model: `config.reward_model_policy(recipe)`. Raises ValueError if the model or the layout is not supported.
        """
        self._world = world
        try:
            self._backend = train.build(model, world.own, seed, ModelRole(head="values", trained=False, offload=offload))
        except ValueError as error:  # it names keys of policy.*, which describes every model
            raise ValueError(f"in the reward model: {error}") from error
        self.place = DataParallelRank(self._backend.data_rank, self._backend.data_size)

    @named_operators()
    def score(self, work: ScoreWork) -> list[float]:
        """Return the score of each sequence, in the order of the microbatches. Collective over the component's group."""
        scores: list[float] = []
        with self._world.phase("score"):
            batches = [pack(list(map(_sample, microbatch)), self._backend.device) for microbatch in work.microbatches]
            for sequences, batch, outputs in zip(work.microbatches, batches, self._backend.forward(batches), strict=True):
                assert outputs.values is not None  # the model has a value head
                ends = outputs.values[batch.cu_seqlens[1:].long() - 1].tolist()
                scores += ends[: len(sequences)]  # an empty microbatch still has one token
        return scores


class RewardRole:
    """Holds the reward model, on ranks of its own."""

    def __init__(self, recipe: Recipe, seed: int, world: World):
        self._recipe = recipe
        self._seed = seed
        self._world = world

    @verb("setup")
    def setup(self) -> DataParallelRank:
        """Build the model and return this rank's position among the data-parallel ranks."""
        with self._world.phase("load reward model"):
            self._scorer = Scorer(config.reward_model_policy(self._recipe), self._world, self._seed, offload=False)
        return self._scorer.place

    @verb("rollout")
    def score(self, work: ScoreWork) -> list[float]:
        """Return the score of each sequence, in the order of the microbatches."""
        return self._scorer.score(work)


def _sample(tokens: np.ndarray) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.zeros(len(tokens), bool), logprobs=zeros, advantages=zeros)

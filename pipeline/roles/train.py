"""What a train rank serves."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import torch

from pipeline import train
from pipeline.algorithms.base import Objective
from pipeline.config import Recipe
from pipeline.data.packing import pack
from pipeline.refit.base import Refit, Report
from pipeline.refit.tables import RankPlan, Table, table
from pipeline.remote import verb
from pipeline.train.background import Background
from pipeline.train.base import TrainBackend
from pipeline.train.export import export
from pipeline.types import DataPlace, PackedBatch, Sample, Update
from pipeline.world import World


class TrainRole:
    """Holds the policy that learns."""

    def __init__(self, recipe: Recipe, seed: int, world: World, algorithm: Objective, refit: Refit | None):
        self._recipe = recipe
        self._seed = seed
        self._world = world
        self._algorithm = algorithm
        self._refit = refit
        self._updates: list[Update] = []
        self._batches: list[list[PackedBatch]] = []  # the microbatches of each update
        self._backend: TrainBackend
        self._background = Background()

    @verb("setup")
    def setup(self) -> DataPlace:
        with self._world.phase("load model"):
            self._backend = train.build(self._recipe.policy, self._world.own, self._seed, self._algorithm.needs.reference)
        return DataPlace(self._backend.data_rank, self._backend.data_size)

    @verb("train")
    def load(self, updates: list[Update]) -> None:
        """Take a step's samples; they stay until the next `load`."""
        with self._world.phase("pack"):
            self._updates = updates
            self._batches = [_pack(update.samples, update.train, self._backend.device) for update in updates]

    @verb("train")
    def forward(self) -> None:
        """Add the log-probs that the algorithm needs from before the first update."""
        with self._world.phase("forward"):
            for field, model, wanted in (
                ("old_logprobs", "policy", self._algorithm.needs.old),
                ("reference_logprobs", "reference", self._algorithm.needs.reference),
            ):
                if wanted:
                    self._batches = [
                        _attach(field, self._per_sample_logprobs(update, model), update, batches)
                        for update, batches in zip(self._updates, self._batches, strict=True)
                    ]

    def _per_sample_logprobs(self, update: Update, model: str) -> dict[int, torch.Tensor]:
        """`[L]` float32 by position in `update.samples`."""
        batches = _pack(update.samples, update.forward, self._backend.device)
        found = {}
        for members, logprobs in zip(update.forward, self._backend.forward(batches, model), strict=True):
            if members:
                lengths = [len(update.samples[i].tokens) for i in members]
                found |= dict(zip(members, logprobs.split(lengths), strict=True))
        return found

    @verb("train")
    def step(self) -> list[dict[str, float]]:
        """One optimizer step per loaded update; the metrics of each."""
        with self._world.phase("step"):
            return [
                self._backend.step(
                    batches, lambda lp, batch, counts=update.counts: self._algorithm.loss(lp, batch, counts)
                ).metrics
                for update, batches in zip(self._updates, self._batches, strict=True)
            ]

    @verb("train")
    def evaluate(self, update: Update) -> float:
        """This data rank's share of the loss, without a gradient."""
        with self._world.phase("evaluate"):
            batches = _pack(update.samples, update.forward, self._backend.device)
            return sum(
                self._algorithm.loss(logprobs, batch, update.counts).loss.item()
                for logprobs, batch in zip(self._backend.forward(batches), batches, strict=True)
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._backend.shapes

    @verb("setup")
    def layout(self) -> Table:
        """What this rank holds."""
        with self._world.phase("layout"):
            return table(self._backend.layout(), self._backend.shapes)

    @verb("setup")
    def follow(self, plan: RankPlan) -> None:
        """Send by this plan from now on."""
        with self._world.phase("plan"):
            self._refit.prepare(self._backend.layout(), None, plan)

    @verb("refit")
    def send(self) -> Report:
        with self._world.phase("send"):
            return self._refit.send(self._backend)

    @verb("save")
    def save(self, folder: str) -> None:
        """With checkpointing.async_save, only copy what is to be written, and let a thread write it."""
        behind = self._recipe.checkpointing.async_save
        with self._world.phase("write"):
            write = functools.partial(self._backend.shards(copy=behind).write, Path(folder), self._world.own.rank())
            if behind:
                self._background.start(write)
            else:
                write()

    @verb("save")
    def written(self, wait: bool) -> bool:
        """Whether what `save` began is on the disk. Raises what became of it if it failed."""
        with self._world.phase("write"):
            if wait:
                self._background.wait()
            return self._background.done()

    @verb("save")
    def restore(self, folder: str) -> None:
        with self._world.phase("read"):
            self._backend.load(Path(folder))

    @verb("save")
    def export(self, folder: str) -> None:
        """Write a Hugging Face checkpoint."""
        with self._world.phase("export"):
            export(self._backend, self._recipe.policy, Path(folder), writes=self._world.rank == 0)


def _pack(samples: list[Sample], microbatches: list[list[int]], device: torch.device) -> list[PackedBatch]:
    return [pack([samples[i] for i in members], device) for members in microbatches]


def _attach(field: str, logprobs: dict[int, torch.Tensor], update: Update, batches: list[PackedBatch]) -> list[PackedBatch]:
    """The training microbatches with one more field, put together from samples."""
    attached = []
    for members, batch in zip(update.train, batches, strict=True):
        values = [logprobs[i] for i in members] or [torch.zeros_like(batch.generate_logprobs)]
        attached.append(dataclasses.replace(batch, **{field: torch.cat(values)}))
    return attached

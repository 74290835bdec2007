"""The role of a train rank: the verbs that it serves.

Each model has a backend of its own. All models have the same parallel layout, so that they take the same microbatches.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline import config, train
from pipeline.algorithms.algorithm import Algorithm, Loss, OnlineAlgorithm
from pipeline.algorithms.reductions import sequence_weights
from pipeline.algorithms.token_advantages import keep_high_entropy, moments, standardize
from pipeline.checkpoints import verification
from pipeline.checkpoints.background_worker import BackgroundWorker
from pipeline.checkpoints.checkpoint import kept, read_record, storage_timeout_s, wait_until_seen
from pipeline.config import PolicyConfig, Recipe, live_keys
from pipeline.config.determinism import named_operators
from pipeline.data.packing import pack_each
from pipeline.files.storage import RetryPolicy
from pipeline.files.stored_files import FileKey
from pipeline.job.world import World
from pipeline.refit.protocol import PreparedRefit, Refit, RefitReport
from pipeline.refit.tables import LayoutTable, RankPlan, layout_table
from pipeline.roles.regroup import regroup
from pipeline.roles.reward import Scorer
from pipeline.roles.teacher_scores import ask_teachers, with_candidates
from pipeline.rollout.rollout_messages import ScoreWork
from pipeline.rpc import verb
from pipeline.train.adapters.spec import refits_adapters
from pipeline.train.checkpoint_state import seed_generators
from pipeline.train.hf_export import export
from pipeline.train.train_backend import ModelRole, TrainBackend
from pipeline.types import (
    AdvantageNormalization,
    DataParallelRank,
    GlobalCounts,
    LossOutput,
    Moments,
    Outputs,
    PackedBatch,
    Sample,
    Update,
)


class TrainRole:
    """Holds the models that learn, policy and critic, and the frozen models: reference, teachers and reward model."""

    def __init__(self, recipe: Recipe, seed: int, world: World, algorithm: Algorithm, refit: Refit | None):
        self._recipe = recipe
        self._seed = seed
        self._world = world
        self._algorithm = algorithm
        self._refit = refit
        self._updates: list[Update] = []
        self._batches: list[list[PackedBatch]] = []  # the microbatches of each update
        self._models: dict[str, TrainBackend] = {}
        self._background = BackgroundWorker()
        self._mean_kl = 0.0  # see PackedBatch.mean_kl
        self._matched: dict[str, torch.Tensor] = {}  # see `match_tokens`
        self._key: FileKey | None = None  # of checkpoints
        self._digests: dict[str, str] = {}  # of the files of the last `save`
        self._retry = RetryPolicy(storage_timeout_s(recipe.cluster.timeouts), kept=lambda: kept(world.info.run_dir))

    @property
    def _policy(self) -> TrainBackend:
        return self._models["policy"]

    @verb("setup")
    def unlock(self, fingerprint: str) -> None:
        """Obtain the key of checkpoints on this node. Raises RecipeError if rank 0 has another key."""
        with self._world.phase("obtain the key"):
            self._key = verification.obtain_key(self._recipe.checkpointing)
            verification.check_same_key(self._key, fingerprint)

    @verb("setup")
    def setup(self) -> DataParallelRank:
        """Build the models and return this rank's position among the data-parallel ranks."""
        recipe, needs = self._recipe, self._algorithm.needs
        role = ModelRole(needs.head, reference=needs.reference, entropy=needs.entropy, truncated=needs.truncated)
        role = dataclasses.replace(role, serves_adapters=refits_adapters(recipe))
        self._build("policy", recipe.policy, role)
        if needs.critic:
            self._build("critic", config.critic(recipe), ModelRole("values"))
        for teacher, model in config.teachers(recipe).items():
            role = ModelRole(trained=False, offload=model.cpu_offload)
            self._build(f"teacher {teacher}".strip(), config.teacher_policy(recipe, model), role)
        environment = config.reward_model(recipe)
        if environment and environment.served_by == "train":
            with self._world.phase("load reward model"):
                self._scorer = Scorer(config.reward_model_policy(recipe), self._world, self._seed, environment.cpu_offload)
        seed_generators(self._seed, self._policy.data_rank)
        return DataParallelRank(self._policy.data_rank, self._policy.data_size)

    def _build(self, name: str, policy: PolicyConfig, role: ModelRole) -> None:
        role = dataclasses.replace(role, phase=self._world.phase)
        if not policy.random_init:
            with self._world.phase(f"verify {name}"):
                verify = self._recipe.checkpointing.verify
                verification.check_export(f"{name}.model_name", Path(policy.model_name), verify, self._share)
        with self._world.phase(f"load {name}"):
            try:
                self._models[name] = train.build(policy, self._world.own, self._seed, role)
            except ValueError as error:  # it names keys of policy.*, which describes every model
                if name == "policy":
                    raise
                raise ValueError(f"of the {name}: {error}") from error

    @verb("setup")
    def match_tokens(self, matched: dict[str, np.ndarray]) -> None:
        """Keep teacher -> the policy's id of each of its tokens with the same text, [V] int32; NO_TOKEN for the others."""
        self._matched = {name: torch.from_numpy(ids.astype(np.int64)) for name, ids in matched.items()}

    @verb("train")
    def load(self, updates: list[Update]) -> None:
        """Pack a step's samples; they stay until the next `load` or `offload`."""
        with self._world.phase("pack"):
            self._updates = updates
            self._batches = [self._pack(update.samples, update.train, self._policy.device) for update in updates]

    def _pack(self, samples: Sequence[Sample], plan: Sequence[list[int]], device: torch.device | str) -> list[PackedBatch]:
        """Pack microbatches. The user's own losses may read the log-probs of all tokens; ours read those that count."""
        batches = pack_each(samples, plan, device)
        if self._algorithm.needs.mismatched:
            batches = [dataclasses.replace(batch, mean_kl=self._mean_kl) for batch in batches]
        if self._recipe.loss_fn.custom or self._recipe.algorithm_class:
            return [dataclasses.replace(batch, wanted=None) for batch in batches]
        return batches

    @verb("train")
    @named_operators()
    def measure_kl(self, updates: list[Update]) -> float:
        """Return the sum of log pi(y) - log pi_ref(y) over these samples' answers y."""
        with self._world.phase("KL of mismatched answers"):
            total = 0.0
            for update in updates:
                batches = self._pack(update.samples, update.forward, self._policy.device)
                outputs = [self._policy.forward(batches, weights) for weights in ("policy", "reference")]
                for batch, policy, reference in zip(batches, *outputs, strict=True):
                    assert policy.logprobs is not None and reference.logprobs is not None
                    difference = policy.logprobs.double() - reference.logprobs.double()
                    total += difference[batch.loss_mask].sum().item()
            return total

    @verb("train")
    def set_mean_kl(self, mean_kl: float) -> None:
        """Give the batches of the next `load` or `evaluate` the KL of the mismatched answers."""
        self._mean_kl = mean_kl

    @verb("train")
    @named_operators()
    def forward(self) -> None:
        """Compute the fields that the algorithm needs of the models before the first update."""
        needs = self._algorithm.needs
        if needs.old:
            first = 0 if needs.old_of_first else 1
            fields = {"old_logprobs": "logprobs", "old_full_logprobs": "full_logprobs"}
            fields |= {"old_entropy": "entropy"} if needs.top_entropy < 1 else {}
            self._attach(lambda out: {ours: getattr(out, name) for ours, name in fields.items()}, "policy", first=first)
        if needs.reference:
            self._attach(lambda out: {"reference_logprobs": out.logprobs}, "policy", weights="reference")
        if needs.critic:
            self._attach(lambda out: {"old_values": out.values}, "critic")
        if needs.has_teachers:
            teachers = {name: model for name, model in self._models.items() if name.split()[0] == "teacher"}
            self._batches = ask_teachers(teachers, self._updates, self._batches, needs.teacher_top_k, self._world.phase)
        if needs.own_top_k:
            self._add_candidates(needs.teacher_top_k)

    def _add_candidates(self, top_k: int) -> None:
        """Give the training microbatches the tokens that the policy compares with those of its teachers."""
        matched = {name: ids.to(self._policy.device) for name, ids in self._matched.items()}
        with self._world.phase("forward of the policy"):
            for i, update in enumerate(self._updates):
                batches = self._pack(update.samples, update.forward, self._policy.device)
                outputs = regroup(self._policy.forward(batches, top_k=top_k), update.forward, update)
                self._batches[i] = [
                    with_candidates(batch, own, matched) for batch, own in zip(self._batches[i], outputs, strict=True)
                ]

    def _attach(self, fields: Callable[[Outputs], dict[str, Any]], model: str, weights: str = "policy", first: int = 0) -> None:
        """Add fields computed from a model's outputs to the training microbatches. first: the first update that gets them."""
        backend = self._models[model]
        with self._world.phase(f"forward of the {'reference' if weights == 'reference' else model}"):
            for i, update in list(enumerate(self._updates))[first:]:
                outputs = backend.forward(self._pack(update.samples, update.forward, backend.device), weights)
                self._batches[i] = [
                    dataclasses.replace(batch, **fields(out))
                    for batch, out in zip(self._batches[i], regroup(outputs, update.forward, update), strict=True)
                ]

    @verb("train")
    def estimate(self) -> list[Moments]:
        """Compute advantages from the fields that `forward` added, and return each update's moments."""
        with self._world.phase("estimate"):
            assert isinstance(self._algorithm, OnlineAlgorithm)  # it has `needs.estimates`
            self._batches = [[self._algorithm.estimate(batch) for batch in batches] for batches in self._batches]
            return [moments(batches) for batches in self._batches]

    @verb("train")
    def standardize(self, to: AdvantageNormalization) -> None:
        """Standardize advantages by the moments of all ranks."""
        self._batches = [[standardize(batch, to) for batch in batches] for batches in self._batches]
        self._updates = [
            dataclasses.replace(update, counts=counts) for update, counts in zip(self._updates, to.counts, strict=True)
        ]

    @verb("train")
    def keep_high_entropy(self) -> list[float]:
        """Set advantages to 0, except for the share `needs.top_entropy` of each update's counted tokens.

        Return the lowest entropy that keeps its advantage in each update, in nats.
        """
        with self._world.phase("high entropy"):
            share = self._algorithm.needs.top_entropy
            kept = [keep_high_entropy(batches, share, self._over_data_ranks) for batches in self._batches]
            self._batches = [batches for batches, _ in kept]
            return [threshold for _, threshold in kept]

    def _over_data_ranks(self, count: int) -> int:
        """Return the sum of a count over the data-parallel ranks. Collective."""
        total = torch.tensor(count, device=self._policy.device)
        dist.all_reduce(total, group=self._world.own)
        return int(total) // (self._world.own.size() // self._policy.data_size)

    @verb("train")
    @named_operators()
    def step(self, models: list[str]) -> dict[str, list[dict[str, float]]]:
        """Take one optimizer step of each model for each epoch and update, and return model -> metrics of its optimizer steps.

        Then advance the schedules of these models, once for the whole step.
        """
        needs, balances = self._algorithm.needs, self._recipe.policy.moe_aux_loss_coeff > 0
        metrics: dict[str, list[dict[str, float]]] = {model: [] for model in models}
        for epoch in range(1, needs.epochs + 1):
            for update, batches in zip(self._updates, self._batches, strict=True):
                for model in models:
                    with self._world.phase(f"step of the {model}"):
                        loss = functools.partial(_loss, self._algorithm.losses[model], update.counts)
                        balanced = balances and model == "policy"
                        packed = [_balanced(batch, update.counts) for batch in batches] if balanced else batches
                        metrics[model].append(self._models[model].step(packed, loss).metrics)
            if epoch == needs.epochs or needs.schedule_every_epoch:
                for model in models:
                    self._models[model].advance_schedule()
        return metrics

    @verb("train")
    def examine_change(self, values: dict[str, Any]) -> str:
        """Return why this rank cannot take these values of live keys; empty if it can. Nothing changes."""
        recipe = copy.deepcopy(self._recipe)
        live_keys.put(recipe, values)
        try:
            self._new_rates(recipe)
        except (AssertionError, TypeError, ValueError) as error:  # of torch's and Megatron-Core's classes too
            return str(error) or f"{type(error).__name__} of the optimizer or its schedule"
        return ""

    @verb("train")
    def change(self, values: dict[str, Any]) -> None:
        """Use new values of live keys (pipeline/config/live_keys.py) from the next step on."""
        live_keys.put(self._recipe, values)
        for take in self._new_rates(self._recipe):
            take()

    def _new_rates(self, recipe: Recipe) -> list[Callable[[], None]]:
        """Return functions that set the learning rates and schedules of a recipe in the models that learn."""
        sections = {model: config.critic(recipe) if model == "critic" else recipe.policy for model in self._algorithm.losses}
        return [self._models[model].new_rates(policy) for model, policy in sections.items()]

    @verb("train")
    @named_operators()
    def evaluate(self, update: Update) -> dict[str, float]:
        """Return metric -> this data rank's share, for the loss and the metrics that add up. Computes no gradient."""
        needs, loss = self._algorithm.needs, self._algorithm.losses["policy"]
        with self._world.phase("evaluate"):
            batches = self._pack(update.samples, update.forward, self._policy.device)
            if needs.reference:
                reference = self._policy.forward(batches, "reference")
                batches = [
                    dataclasses.replace(batch, reference_logprobs=out.logprobs)
                    for batch, out in zip(batches, reference, strict=True)
                ]
            shares: dict[str, float] = {}
            for outputs, batch in zip(self._policy.forward(batches), batches, strict=True):
                share = loss(outputs, batch, update.counts)
                for name, value in {"loss": share.loss, **share.metrics}.items():
                    if not name.endswith(("_max", "_min", "_histogram", "_moments", "_weighted")):
                        shares[name] = shares.get(name, 0.0) + value.item()
            return shares

    @verb("train")
    def score(self, work: ScoreWork) -> list[float]:
        """Return scores by the reward model that the train ranks serve."""
        return self._scorer.score(work)

    @verb("train")
    def offload(self, keep_weights: bool) -> None:
        """Move the models off the GPU for the generate rank that shares it. keep_weights: the policy's stay, for a refit."""
        with self._world.phase("offload"):
            self._updates, self._batches = [], []  # the step has ended
            for name, model in self._models.items():
                model.offload(keep_weights=keep_weights and name == "policy")

    @verb("train")
    def reload(self) -> None:
        """Move the models back to the GPU."""
        with self._world.phase("reload"):
            for model in self._models.values():
                model.reload()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The policy's Hugging Face tensors: name -> shape."""
        return self._policy.shapes

    @verb("setup")
    def layout(self) -> LayoutTable:
        """Return the layout of the weights that this rank holds."""
        with self._world.phase("layout"):
            return layout_table(self._policy.layout(), self._policy.shapes)

    @verb("setup")
    def prepare_refit(self, plan: RankPlan) -> None:
        """Send by this plan from now on."""
        with self._world.phase("plan"):
            assert isinstance(self._refit, PreparedRefit)
            self._refit.prepare(self._policy.layout(), None, plan)

    @verb("refit")
    def send(self) -> RefitReport:
        """Send this rank's share of the policy's weights."""
        with self._world.phase("send"):
            assert self._refit
            return self._refit.send(self._policy)

    @verb("save")
    def save(self, folder: str) -> None:
        """Write a checkpoint. With checkpointing.async_save, copy the state and write it in a thread."""
        behind = self._recipe.checkpointing.async_save
        with self._world.phase("write checkpoint"):
            shards = {self._folder(model, folder): self._models[model].shards(copy=behind) for model in self._algorithm.losses}

            key = self._key if self._recipe.checkpointing.encryption.enabled else None

            def write() -> None:
                self._digests = {}
                for path, model_shards in shards.items():
                    digests = model_shards.write(path, self._world.own.rank(), self._retry, key)
                    inside = path.relative_to(folder)
                    self._digests |= {str(inside / name): digest for name, digest in digests.items()}

            if behind:
                self._background.start(write)
            else:
                write()

    @verb("save")
    def written(self, wait: bool) -> dict[str, str] | None:
        """Return path -> SHA-256 of this rank's files of the last `save`; None before all are on disk.

        Raises the error of the `save` if it failed.
        """
        with self._world.phase("wait for checkpoint"):
            if wait:
                self._background.wait()
            return self._digests if self._background.done() else None

    @verb("save")
    def restore(self, folder: str) -> None:
        """Verify this rank's share of a checkpoint's files, and then load the models from its folder."""
        group = self._world.own
        with self._world.phase("verify"):
            if self._world.info.local_rank == 0:  # one rank looks for all of its node: there may be thousands of files
                wait_until_seen(Path(folder))
            dist.barrier(group)
            verification.check_share(read_record(Path(folder)), self._recipe.checkpointing.verify, self._share)
            dist.barrier(group)
        with self._world.phase("read"):
            for model in self._algorithm.losses:
                self._models[model].load(self._folder(model, folder), self._key)

    @property
    def _share(self) -> tuple[int, int]:
        """This rank's share of files to verify."""
        return self._world.own.rank(), self._world.own.size()

    def _folder(self, model: str, folder: str) -> Path:
        """Return a model's folder within a checkpoint."""
        return Path(folder) if model == "policy" else Path(folder) / model

    @verb("save")
    def export(self, folder: str) -> dict[str, str]:
        """Write a Hugging Face checkpoint, and return file name -> SHA-256; {} on ranks that do not write."""
        with self._world.phase("export"):
            head = self._algorithm.needs.head
            writes = self._world.rank == 0
            return export(self._policy, self._recipe.policy, Path(folder), writes=writes, head=head, retry=self._retry)


def _balanced(batch: PackedBatch, counts: GlobalCounts) -> PackedBatch:
    """Return a batch with the weights of its sequences' load-balancing losses."""
    return dataclasses.replace(batch, balance=sequence_weights(batch, counts))


def _loss(loss: Loss, counts: GlobalCounts, outputs: Outputs, batch: PackedBatch) -> LossOutput:
    return loss(outputs, batch, counts)

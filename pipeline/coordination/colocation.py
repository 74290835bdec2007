"""Move trainer and engine on and off the GPUs that the train and generate ranks of a node share.

    training      the trainer is on the GPU; the engine sleeps
    refit         the policy's weights are on the GPU, the rest of the trainer on the host; the engine's weights are awake
    generating    the trainer is on the host; weights and cache of the engine are awake

The old owner's memory is freed before the new owner allocates, so a GPU holds at most the largest of these three states. Memory
moves only when a block needs it: leaving a block moves nothing, so successive rollouts cost no moves. If each component has its
own GPUs, nothing ever moves.

A sleeping engine discards its weights, since the next refit sends all of them; with an incremental refit it keeps them. If the
engine has to generate without a refit (after a checkpoint was saved), a refit gives it the same version again. This module does
not move a reward model on the train ranks, which has `cpu_offload` of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.coordination.refit_coordinator import RefitCoordinator
from pipeline.roles import GenerateRole, TrainRole
from pipeline.rpc import RpcGroup


class Colocation:
    """The owner of shared GPUs, on rank 0. It begins with the trainer on the GPU and the engine asleep."""

    def __init__(
        self, shared: bool, train: RpcGroup[TrainRole], generate: RpcGroup[GenerateRole], refits: RefitCoordinator | None
    ):
        """Bind to the components. shared: whether they share GPUs. refits: None if the run has no generate ranks."""
        self._shared = shared
        self._train, self._generate, self._given = train, generate, refits
        self._turn = "training"
        self._moving = 0.0  # seconds, until the next refit reports them

    @property
    def _refits(self) -> RefitCoordinator:
        assert self._given, "only a run with generate ranks refits"
        return self._given

    @contextmanager
    def training(self) -> Iterator[None]:
        """Move the trainer onto the GPU, if it is not there, for a block."""
        if self._shared and self._turn != "training":
            with self._clock():
                self._generate.call(GenerateRole.sleep, self._refits.incremental).result()
                self._train.call(TrainRole.reload).result()
            self._turn = "training"
        yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Move the engine onto the GPU, if it is not there, for a block."""
        if self._shared and self._turn != "generating":
            version = self._refits.version
            assert version is not None, "a refit comes before the first rollout"
            cost = self.refit(version)
            self._moving = cost["time/sharing"]  # the next refit reports it
        yield

    def refit(self, version: int) -> dict[str, float]:
        """Let the engines serve the current weights as `version`, and be ready to generate. Return metrics of the cost."""
        if not self._shared:
            return self._refits(version)
        if self._turn == "generating":  # the weights are unchanged, but a refit reads them on the GPU
            with self.training():
                pass
        with self._clock():
            self._train.call(TrainRole.offload, True).result()
            self._generate.call(GenerateRole.wake, "weights").result()
        cost = self._refits(version)
        with self._clock():
            self._train.call(TrainRole.offload, False).result()
            self._generate.call(GenerateRole.wake, "cache").result()
        self._turn = "generating"
        moving, self._moving = self._moving, 0.0
        return cost | {"time/sharing": moving}

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._moving += time.perf_counter() - start

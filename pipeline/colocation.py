"""Who has the GPUs when, where the train and the generate ranks of a node share them.

    training      the trainer is on the GPU; the engine sleeps
    refit         the policy's weights stay, the rest of the trainer is on the host; the engine's weights are awake, no cache
    generating    the trainer is on the host; the engine is awake

What has to leave leaves before what has to come comes, so the most that a GPU ever holds is the largest of these three. Moving
happens when something is needed: a block that is left leaves everything where it is, so rollouts that follow each other move
nothing. Where each component has GPUs of its own nothing is ever moved.

An engine that sleeps loses its weights, for the next refit brings all of them, but where that brings only what has changed. If
it has to generate without one (a checkpoint was saved in between), it is refitted with the version that it had.
Left out: a reward model that the train ranks serve, which comes and goes by its own `cpu_offload`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.refit.coordination import RefitCoordinator
from pipeline.rpc import RpcGroup


class Colocation:
    """On rank 0. It begins with the trainer on the GPU and the engine asleep."""

    def __init__(self, shared: bool, train: RpcGroup, generate: RpcGroup, refits: RefitCoordinator | None):
        """refits: None where nobody generates."""
        self._shared = shared
        self._train, self._generate, self._refits = train, generate, refits
        self._turn = "training"
        self._moving = 0.0  # seconds, until a refit tells them

    @contextmanager
    def training(self) -> Iterator[None]:
        if self._shared and self._turn != "training":
            with self._clock():
                self._generate.sleep(self._refits.incremental).result()
                self._train.reload().result()
            self._turn = "training"
        yield

    @contextmanager
    def generating(self) -> Iterator[None]:
        if self._shared and self._turn != "generating":
            cost = self.refit(self._refits.version)
            self._moving = cost["time/sharing"]  # which the next refit tells
        yield

    def refit(self, version: int) -> dict[str, float]:
        """Let the engines serve the present weights as `version`, and generate next; what it took, as metrics."""
        if not self._shared:
            return self._refits(version)
        if self._turn == "generating":  # nothing has changed, but the weights are not where a refit reads them
            with self.training():
                pass
        with self._clock():
            self._train.offload(True).result()
            self._generate.wake("weights").result()
        cost = self._refits(version)
        with self._clock():
            self._train.offload(False).result()
            self._generate.wake("cache").result()
        self._turn = "generating"
        moving, self._moving = self._moving, 0.0
        return cost | {"time/sharing": moving}

    @contextmanager
    def _clock(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._moving += time.perf_counter() - start

"""Layers of hybrid models, and the sizes of mixers that are not attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StateSpace:
    """A Mamba-2 mixer (https://arxiv.org/abs/2405.21060): a convolution along the sequence and a selective state space."""

    heads: int
    head_dim: int  # size of a head's input and output
    groups: int  # each shares its B and C among heads / groups heads, and is a group of the gated norm
    state: int  # size of a head's state for each entry of its input
    kernel: int  # tokens of the convolution
    chunk: int  # tokens of a chunk, within which the scan is a matrix product
    smallest_step: float  # lower bound of a step
    epsilon: float  # of the gated norm

    @property
    def width(self) -> int:
        """Return the size of the input of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Return the numbers of channels of the convolution: input, B, C."""
        return self.width, self.groups * self.state, self.groups * self.state

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of rows of the joint projection: gate, input, B, C, steps."""
        return self.width, *self.convolved, self.heads


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a layer: a mixer along the sequence, an MLP (or experts), or both. Each has its norm and residual."""

    mixer: Literal["attention"] | StateSpace | None
    feed_forward: bool

"""Layers of hybrid models, and the sizes of mixers that are not attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

STATEFUL = ("linear_attention", "mamba", "hybrid", "hybrid_sliding", "conv", "recurrent")
"""Kinds of layers that keep a state for a sequence, under transformers' names (configuration_utils.py,
ALLOWED_ATTN_LAYER_TYPES) and under names in older files."""
_STATE_SIZES = ("mamba_", "ssm_", "state_size", "linear_num_", "linear_conv_", "linear_attn_", "conv_L_cache")
"""Prefixes of keys for sizes of such layers. They identify these models if config.json does not list the kinds of layers."""


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
        """The size of the input of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The convolution's numbers of channels: (input, B, C)."""
        return self.width, self.groups * self.state, self.groups * self.state

    @property
    def by_head(self) -> tuple[bool, bool, bool]:
        """Return for each part of `convolved` whether each head has its own; heads of a group share the other parts."""
        return True, False, False

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """The joint projection's numbers of rows: (gate, input, B, C, steps)."""
        return self.width, *self.convolved, self.heads

    @property
    def operations(self) -> int:
        """The operations of the scan per token: scores and outputs in the token's chunk, reads and writes of the state."""
        return 2 * self.chunk * (self.groups * self.state + self.width) + 4 * self.width * self.state

    @property
    def kept(self) -> int:
        """Return the values of the states of all heads, which generation keeps for a sequence."""
        return self.width * self.state

    @property
    def scanned(self) -> int:
        """The number of float32 values per token that torch's implementation of the scan saves for the backward pass."""
        return 3 * (self.width + self.chunk * self.heads)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net (https://arxiv.org/abs/2412.06464): a convolution along the sequence and the gated delta rule."""

    groups: int  # heads of queries and keys; each serves heads / groups heads
    heads: int  # heads of values, states and outputs
    key_dim: int  # size of a query and a key
    value_dim: int  # size of a value
    kernel: int  # tokens of the convolution
    epsilon: float  # of the gated norm
    chunk: int = 64  # tokens of a chunk, within which the rule is a matrix product

    @property
    def width(self) -> int:
        """The size of the values of all heads together."""
        return self.heads * self.value_dim

    @property
    def convolved(self) -> tuple[int, int, int]:
        """The convolution's numbers of channels: (queries, keys, values)."""
        return self.groups * self.key_dim, self.groups * self.key_dim, self.width

    @property
    def by_head(self) -> tuple[bool, bool, bool]:
        """Return for each part of `convolved` whether each head has its own; heads of a group share the other parts."""
        return False, False, True

    @property
    def projected(self) -> tuple[int, int, int, int, int, int]:
        """The joint projection's numbers of rows: (queries, keys, values, gate, strength, decay)."""
        return *self.convolved, self.width, self.heads, self.heads

    @property
    def operations(self) -> int:
        """The operations of the delta rule per token: products and a triangular system in its chunk, and those on its state."""
        inside = self.chunk * self.heads * (5 * self.key_dim + 3 * self.value_dim)
        return inside + 6 * self.heads * self.key_dim * self.value_dim

    @property
    def kept(self) -> int:
        """Return the values of the states of all heads, which generation keeps for a sequence."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def scanned(self) -> int:
        """An estimate of the float32 values per token that torch's implementation of the rule saves for the backward pass."""
        return self.heads * (6 * self.key_dim + 5 * self.value_dim + 4 * self.chunk)


def has_states(config: Mapping[str, Any]) -> bool:
    """Return whether some layers of a config.json keep a state for a sequence: state spaces, delta nets, convolutions."""
    lists = (config.get(name) for name in ("layer_types", "layers_block_type", "block_types"))
    if kinds := next(filter(None, lists), None):  # it decides: Granite 4.0 Micro has sizes of Mamba, and attention alone
        return any(kind in STATEFUL for kind in kinds)
    return any(name.startswith(_STATE_SIZES) for name, value in config.items() if value is not None)


def kept_bytes(mixer: StateSpace | DeltaNet, size: int, state_size: int = 4) -> int:
    """Return the bytes that generation keeps for a sequence: inputs of the convolution, and the state of each head.

    size: bytes of one input's element. state_size: bytes of one state's element.
    """
    return size * (mixer.kernel - 1) * sum(mixer.convolved) + state_size * mixer.kept


@dataclass(frozen=True, slots=True)
class Layer:
    """The parts of a layer: a mixer along the sequence, an MLP (or experts), or both. Each part has its norm and residual."""

    mixer: Literal["attention"] | StateSpace | DeltaNet | None
    feed_forward: bool

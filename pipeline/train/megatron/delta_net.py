"""Gated delta nets over packed sequences (https://arxiv.org/abs/2412.06464): the delta rule, and its mixer for Megatron-Core.

Per head, with query q_t and key k_t [N] of length 1 (shared by the heads of a group), value v_t [P], strength b_t in (0, 1) and
decay g_t < 0:

    h_t = exp(g_t) h_{t-1} + b_t k_t (v_t - exp(g_t) h_{t-1}^T k_t)^T,    y_t = h_t^T q_t / sqrt(N)        h [N, P], 0 at first

A chunk's changes u_t = b_t (v_t - ...) solve a triangular system (section 3.3), so a chunk is computed by matrix products.
Where flash-linear-attention is installed, its kernel computes the same on a GPU; elsewhere torch does.
"""

from __future__ import annotations

import importlib
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.models.mixers import DeltaNet
from pipeline.train.megatron.mixer import (
    HeadShare,
    Mixer,
    MixerSubmodules,
    by_runs,
    chunks,
    convolve,
    decay_between,
    token_positions,
)
from pipeline.train.sequence_bounds import Packing

_NORM_EPSILON = 1e-6  # of the lengths of queries and keys


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    strength: torch.Tensor,
    decay: torch.Tensor,
    packing: Packing,
    chunk: int,
) -> torch.Tensor:
    """Return y [T, R, P] of query and key [T, G, N], value [T, R, P], strength and decay [T, R], in float32.

    Queries and keys may have any length (norm). chunk: the number of tokens that are computed together by matrix products.
    """
    query, key, value, strength, decay = (tensor.float() for tensor in (query, key, value, strength, decay))
    query, key = (tensor * (tensor.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt() for tensor in (query, key))
    query = query * query.size(-1) ** -0.5
    return by_runs(partial(_chunked_scan, chunk), packing, query, key, value, strength, decay)


def _chunked_scan(
    chunk: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, strength: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Return h^T q [S, L, R, P] of S sequences of equal length L.

    query and key [S, L, G, N], value [S, L, R, P], strength and decay [S, L, R].
    """
    length, states = value.size(1), key.size(-1)
    size = min(chunk, length)
    shared = value.size(2) // key.size(2)  # heads of a group
    # S sequences, K chunks of Q tokens, R heads: [S, K, R, Q, ...]
    query, key, value, strength, decay = (
        chunks(tensor, -length % size, size).transpose(2, 3) for tensor in (query, key, value, strength, decay)
    )
    query, key = (tensor.repeat_interleave(shared, 2) for tensor in (query, key))
    total = decay.cumsum(-1).exp()[..., None]  # from a chunk's start to each of its tokens
    between = decay_between(decay)
    # u_i = b_i (v_i - total_i h^T k_i - sum_{j < i} between_ij (k_i . k_j) u_j), h: the state at the chunk's start
    system = (strength[..., None] * between * (key @ key.mT)).tril(-1)  # its diagonal of ones is implied
    sides = strength[..., None] * torch.cat([total * key, value], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    of_state, of_values = solved.tensor_split([states], -1)
    scores = between * (query @ key.mT)
    query = total * query
    ending = between[..., -1, :, None] * key  # each key as it has decayed at the chunk's end
    state, outputs = value.new_zeros(len(value), value.size(2), states, value.size(-1)), []
    for k in range(value.size(1)):
        changes = of_values[:, k] - of_state[:, k] @ state  # [S, R, Q, P]
        outputs.append(query[:, k] @ state + scores[:, k] @ changes)
        state = total[:, k, :, -1:] * state + ending[:, k].mT @ changes
    return torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)[:, :length]


@cache
def _kernels() -> ModuleType | None:
    """Return flash-linear-attention's module with the gated delta rule, if it is installed."""
    try:
        return importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None


class DeltaNetMixer(Mixer[DeltaNet]):
    """A gated delta net. Of the projection's two numbers for each head, the first gives the strength, the second the decay."""

    def __init__(self, config: TransformerConfig, submodules: MixerSubmodules, layer_number: int, **named: Any) -> None:
        super().__init__(config, submodules, layer_number, **named)
        self.norm_weight = self._whole(self._sizes.value_dim)  # of every head, so each rank has the gradient of its heads

    @override
    def parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = (sum(self._sizes.convolved), self._sizes.width, 2 * self._sizes.heads)
        convolved, gate, of_heads = projected.split([size // self._ranks for size in sizes], -1)
        return convolved, of_heads.unflatten(-1, (2, -1)), gate

    @override
    def mix(
        self, convolved: torch.Tensor, of_heads: torch.Tensor, packing: Packing, share: HeadShare | None = None
    ) -> torch.Tensor:
        sizes, groups = self._sizes, self._sizes.groups // self._ranks
        weight, dt_bias, a_log = self.conv_weight[:, 0], self.dt_bias, self.A_log
        if share is not None:
            weight, dt_bias, a_log, groups = weight[share.channels], dt_bias[share.heads], a_log[share.heads], share.groups
        convolved = convolve(convolved, weight, None, token_positions(packing))
        keys = groups * sizes.key_dim
        query, key, value = convolved.tensor_split([keys, 2 * keys], -1)
        query, key = (tensor.unflatten(-1, (groups, -1)) for tensor in (query, key))
        value = value.unflatten(-1, (-1, sizes.value_dim))
        strength = of_heads[:, 0].sigmoid()
        decay = -a_log.float().exp() * F.softplus(of_heads[:, 1].float() + dt_bias.float())
        kernels = _kernels() if convolved.is_cuda else None
        if kernels is None:
            return delta_rule(query, key, value, strength, decay, packing, sizes.chunk).flatten(1).to(convolved.dtype)
        query, key = (tensor.repeat_interleave(value.size(1) // groups, 1) for tensor in (query, key))
        mixed, _ = kernels.chunk_gated_delta_rule(
            *(tensor[None] for tensor in (query, key, value)),
            g=decay[None],
            beta=strength[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=packing.cu_seqlens,
        )
        return mixed[0].flatten(1)

    @override
    def norm(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the RMSNorm of each head's outputs, multiplied by SiLU of the gate."""
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self._tensor)  # sums gradients over ranks
        heads = mixed.float().unflatten(-1, (-1, self._sizes.value_dim))
        normed = weight * F.rms_norm(heads, heads.shape[-1:], eps=self._sizes.epsilon).to(mixed.dtype)
        return (normed.flatten(1) * F.silu(gate.float())).to(mixed.dtype)

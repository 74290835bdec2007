"""A norm of queries or keys over all heads together, of which each tensor-parallel rank has some."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.train.megatron.local_modules import module_device


class JointNorm(MegatronModule):
    """RMSNorm over the `heads` heads of all tensor-parallel ranks together: a rank's [t, 1, H', D] -> [t, 1, H', D].

    The weight [heads D] is whole on every rank. A rank has gradients for its own heads; Megatron-Core sums them over the ranks,
    as for all norms of queries and keys. Several ranks have the same head if there are more ranks than heads. Squares are
    summed in float32 or wider.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__(config=config)
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        self._copies = max(1, ranks // heads)  # ranks that have the same head
        self._first = rank * heads // ranks * hidden_size  # this rank's first entry
        self._size, self._eps = heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.empty(self._size, dtype=config.params_dtype, device=module_device(config)))

    @override
    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        squares = wide.square().sum((-2, -1), keepdim=True) / self._copies
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        weight = self.weight.narrow(0, self._first, heads.shape[-2:].numel()).view(heads.shape[-2:])
        return weight * (wide * torch.rsqrt(squares / self._size + self._eps)).to(heads.dtype)

    @override
    def sharded_state_dict(self, *args, **kwargs) -> dict:
        return {}

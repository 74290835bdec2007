"""Experts whose weights lie as in gpt-oss's checkpoints: [in, out], with gate and up projection alternating.

Megatron-Core's own experts hold [out, in], gate before up. Checkpoints, refits and exports move boxes and cannot transpose, so
these modules hold the weights as they are on disk. Each expert is whole on its rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.train.megatron.local_modules import module_device


class TransposedLinear(torch.nn.Module):
    """A linear layer of an expert, with a weight [in, out] and a bias [out]."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": module_device(config)}
        self.weight = torch.nn.Parameter(torch.empty(inputs, outputs, **options))
        self.bias = torch.nn.Parameter(torch.empty(outputs, **options))
        for parameter in (self.weight, self.bias):
            # Other tensor-parallel ranks have other experts.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            attributes: Any = parameter  # of Megatron-Core: whether all data-parallel ranks have it
            attributes.allreduce = config.expert_model_parallel_size == 1

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class AlternatingExpert(MegatronModule):
    """One expert, a gated MLP. It maps tokens [t, H] and the router's weights [t] to weighted outputs [t, H]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        assert config.moe_ffn_hidden_size is not None  # of a mixture of experts
        self.linear_fc1 = TransposedLinear(config.hidden_size, 2 * config.moe_ffn_hidden_size, config)
        self.linear_fc2 = TransposedLinear(config.moe_ffn_hidden_size, config.hidden_size, config)

    @override
    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).unflatten(-1, (-1, 2)).unbind(-1)
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out = self.linear_fc2(self.config.activation_func(gate) * (up + self.config.glu_linear_offset))
        return (out * weights[:, None]).to(x.dtype)


class AlternatingExperts(MegatronModule):
    """This rank's experts, which replace Megatron-Core's module of experts. They are computed one after the other."""

    def __init__(self, count: int, config: TransformerConfig, submodules=None, pg_collection=None) -> None:
        super().__init__(config=config)
        self.local_experts = torch.nn.ModuleList(AlternatingExpert(config) for _ in range(count))

    @override
    def forward(self, hidden, tokens_per_expert, probs) -> tuple[torch.Tensor, None]:
        """Return (weighted outputs [t, H], None for no bias).

        hidden [t, H]: tokens, sorted by expert. tokens_per_expert [E]. probs [t]: the router's weights of these tokens.
        """
        counts = tokens_per_expert.tolist()
        parts = zip(self.local_experts, hidden.split(counts), probs.split(counts), strict=True)
        return torch.cat([expert(x, weights) for expert, x, weights in parts]), None

"""The load-balancing loss of mixtures of experts (policy.moe_aux_loss_coeff), for both backends.

For a sequence of T tokens, of which each goes to k of E experts, a layer's loss is that of DeepSeek-V3
(https://arxiv.org/abs/2412.19437 eq. 17 to 20), Megatron-Core's seq_aux_loss:

    L = sum_i f_i P_i        f_i = E / (k T) sum_t [p_ti is among the k largest p_t]        P_i = 1/T sum_t p_ti

p_t is the softmax of the router's logits or, if the router's scores are sigmoids, these divided by their sum. As in the paper,
f depends on p alone: not on the bias that balances some routers, on groups of experts, or on replayed choices. L is 1 if each
expert gets T k / E tokens, and E / k if the same k experts get all.

All tokens of a sequence count, its prompt included, since routers see them all; padding does not. An optimizer step adds

    coefficient * sum over layers and sequences of w L        w = the sequence's share of the tokens that the step's loss counts

f has no gradient, so w L is linear in p. Each rank differentiates it for the tokens that it has, once the tokens that each
expert gets of a sequence are summed over the ranks that share the sequence. Other sequences do not matter, so gradients are
equal for all microbatches and layouts.

Not supported: counts over all sequences of a microbatch or step (Megatron-Core's aux_loss and global_aux_loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class BalancedRows:
    """The sequences of a rank's t rows, of S sequences."""

    sequence: torch.Tensor  # [t] int64: the row's sequence; S for padding
    scale: torch.Tensor  # [S+1] float32: w / T^2 of each sequence; 0 for padding

    def part(self, group: dist.ProcessGroup) -> BalancedRows:
        """Return those of the rows that this rank of a group has, if the ranks split them."""
        return BalancedRows(self.sequence.chunk(group.size())[group.rank()], self.scale)


class LoadBalancing:
    """The loss of a model's mixtures, and what it measures in an optimizer step."""

    def __init__(self, coefficient: float, layers: int, shared: Sequence[dist.ProcessGroup], counts: bool = True) -> None:
        """layers: the number of mixtures on all ranks. shared: groups of ranks that share each sequence.

        counts: whether metrics count this rank's tokens; False if another rank has the same.
        """
        self._coefficient, self._layers, self._counts = coefficient, layers, counts
        self._shared = [group for group in shared if group.size() > 1]
        self._losses: dict[int, Any] = {}  # by layer: [] float64
        self._loads: dict[int, Any] = {}  # by layer: [E] float64, the tokens that went to each expert
        self._factor = 1.0

    def begin(self, factor: float = 1.0) -> None:
        """Begin an optimizer step. factor: the factor by which its loss is multiplied before it is differentiated."""
        self._losses, self._loads, self._factor = {}, {}, factor

    def attach(
        self,
        output: torch.Tensor,
        probabilities: torch.Tensor,
        visits: torch.Tensor,
        chosen: int,
        rows: BalancedRows,
        layer: int,
        measured: bool,
    ) -> torch.Tensor:
        """Return an output of a layer's mixture, whose backward pass adds the loss's gradient to that of `probabilities`.

        probabilities [t, E]: p. visits [t, E] bool: whether a token goes to an expert. chosen: k. measured: False if this pass
        repeats another.
        """
        with torch.no_grad():
            experts = probabilities.size(1)
            likely = torch.zeros_like(probabilities, dtype=torch.float32)
            likely.scatter_(1, probabilities.topk(chosen, 1).indices, 1.0)
            counts = torch.zeros(len(rows.scale), experts, device=output.device)
            counts.index_add_(0, rows.sequence, likely)  # exact in any order
            for group in self._shared:
                dist.all_reduce(counts, group=group)
            slopes = experts / chosen * rows.scale[:, None] * counts
            if measured:
                loss = (probabilities * slopes[rows.sequence]).sum(dtype=torch.float64)
                load = (visits & (rows.scale > 0)[rows.sequence, None]).sum(0).double()
                self._losses[layer] = self._losses.get(layer, 0) + loss
                self._loads[layer] = self._loads.get(layer, 0) + load
            slopes *= self._coefficient * self._factor
        return _Attach.apply(output, probabilities, slopes, rows.sequence)

    def metrics(self, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
        """Return the step's metrics, equal on all ranks of `group`. Collective.

        moe_aux_loss: the mean of L over layers and, with their weights w, sequences; 1 if experts are balanced.
        moe_load_imbalance: the tokens of a layer's busiest expert over those of its average expert, in the step, as a mean
        over layers; moe_load_imbalance_max: of the worst layer. All are 0 if the step's loss counts no token.
        """
        experts = torch.tensor(max((len(load) for load in self._loads.values()), default=0), device=device)
        dist.all_reduce(experts, op=dist.ReduceOp.MAX, group=group)  # a pipeline stage may have no mixture
        table = torch.zeros(self._layers, 1 + int(experts), dtype=torch.float64, device=device)
        for layer, load in self._loads.items() if self._counts else ():
            table[layer, 0], table[layer, 1:] = self._losses[layer], load
        dist.all_reduce(table, group=group)
        losses, loads = table[:, 0], table[:, 1:]
        imbalance = loads.amax(1) / loads.mean(1).clamp(min=1e-9)  # without tokens, both are 0
        return {
            "moe_aux_loss": losses.mean().item(),
            "moe_load_imbalance": imbalance.mean().item(),
            "moe_load_imbalance_max": imbalance.max().item(),
        }


class _Attach(torch.autograd.Function):
    """Returns `output`. The gradient of the probabilities [t, E] is their sequence's row of `slopes`, [S+1, E]."""

    @staticmethod
    @override
    def forward(ctx, output: torch.Tensor, probabilities: torch.Tensor, slopes: torch.Tensor, sequence: torch.Tensor):
        ctx.save_for_backward(slopes, sequence)
        ctx.dtype = probabilities.dtype
        return output.view_as(output)

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        slopes, sequence = ctx.saved_tensors
        return grad, slopes[sequence].to(ctx.dtype), None, None

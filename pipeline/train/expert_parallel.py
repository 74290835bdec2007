"""Expert parallelism of the FSDP2 backend: each rank holds whole experts, and tokens travel to their experts.

transformers keeps a layer's experts in one module with parameters [E, ...]. Its forward gets (hidden [T, H], experts [T, K],
weights [T, K]) and returns the weighted sums [T, H]. Here the module's parameters are cut over the expert-parallel ranks. Its
new forward sends each token once to every rank that has some of the token's experts (all-to-all). That rank runs the model's
own forward on pairs of a token and one expert, sums the results of each token, and sends the sums back. The token's rank sums
them over ranks. Routers and shared experts stay as they are.

With tensor parallelism every rank of a group has all tokens of a batch and computes the same router. Each rank then sends its
own part of the tokens, and the results are gathered, so experts are not cut by tensor parallelism.

Sums are in float32 or more, and in an order that depends on the layout only.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from typing_extensions import override

from pipeline.config import Problem, RecipeError
from pipeline.train.context_parallel import ExchangeRows, GatherContextParallel, SplitRows, exchange

KEY = "policy.dtensor_cfg.expert_parallel_size"


def expert_modules(hf: PreTrainedModel) -> dict[str, nn.Module]:
    """Return {name: module} of the modules of experts, one per layer, whose implementation transformers lets one choose."""
    return {name: module for name, module in hf.named_modules() if hasattr(module, "_is_expert_parallel")}


def distribute(hf: PreTrainedModel, mesh: DeviceMesh, tokens: dist.ProcessGroup | None) -> list[nn.Module]:
    """Cut the experts of a model on the meta device over the 1-d mesh, in place, and return their modules.

    tokens: the tensor-parallel ranks that have the same tokens; None: each has its own. Raises RecipeError if the model's
    experts cannot be divided.
    """
    modules = expert_modules(hf)
    check_experts(hf, mesh.size(), modules)
    for module in modules.values():
        if mesh.size() > 1:
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, _cut(parameter, mesh))
        forward = functools.partial(_forward, module, type(module), mesh.get_group(), tokens)
        module.forward = torch.compiler.disable(forward)
    return list(modules.values())


def check_experts(hf: PreTrainedModel, size: int, modules: dict[str, nn.Module]) -> None:
    """Raise RecipeError if the experts of a model cannot be divided over `size` ranks. modules: `expert_modules(hf)`."""
    name = type(hf).__name__
    if not modules:
        mixture = any(parameter.dim() > 2 for parameter in hf.parameters())
        reason = "has experts that transformers does not dispatch by token" if mixture else "has no experts"
        raise RecipeError(Problem(KEY, "unsupported", f"got {size} for {name}, which {reason}; expected 1"))
    for path, module in modules.items():
        count = int(module.num_experts)  # pyright: ignore[reportArgumentType] - every such module has this number
        if count % size:
            raise RecipeError(Problem(KEY, "not-divisible", f"got {size}; expected a divisor of the {count} experts of {name}"))
        if odd := [n for n, p in module.named_parameters() if "." in n or p.shape[0] != count]:
            message = f"got {size} for {name}, whose parameter {path}.{odd[0]} is not one entry per expert; expected 1"
            raise RecipeError(Problem(KEY, "unsupported", message))


def _cut(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter [E, ...] on the meta device as a DTensor, of which this rank holds its experts."""
    part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    cut = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


# ---- the forward pass ---------------------------------------------------------------------------------------------------


def _forward(
    module: nn.Module,
    kind: type[nn.Module],
    experts: dist.ProcessGroup,
    tokens: dist.ProcessGroup | None,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums [T, H] of the experts' outputs.

    kind: the class of `module` before `fully_shard` changed it. hidden [T, H], index [T, K] int64, weights [T, K]: the inputs
    for this rank's tokens. experts: the ranks, which hold other experts each. All ranks of `tokens` pass the same tokens.
    """
    if tokens is None:
        return _dispatch(module, kind, experts, hidden, index, weights)
    # Zeros fill the last ranks' parts, so that all parts are equally long.
    missing = -len(hidden) % tokens.size()
    whole = (F.pad(rows, (0, 0, 0, missing)) if missing else rows for rows in (hidden, index, weights))
    parts = (SplitRows.apply(rows, tokens) for rows in whole)
    return GatherContextParallel.apply(_dispatch(module, kind, experts, *parts), tokens)[: len(hidden)]


def _dispatch(
    module: nn.Module, kind: type[nn.Module], group: dist.ProcessGroup, hidden: torch.Tensor, index: torch.Tensor, weights: Any
) -> torch.Tensor:
    """Return the weighted sums [T, H] of this rank's tokens, which the ranks of the tokens' experts compute."""
    size = int(module.num_experts) // group.size()  # pyright: ignore[reportArgumentType] - as above
    ranks = index // size
    visits = torch.zeros(len(index), group.size(), dtype=torch.bool, device=index.device).scatter_(1, ranks, True)
    to, token = visits.T.nonzero(as_tuple=True)  # [P] each: token `token` goes to rank `to`, in the order of ranks
    first = size * to[:, None]
    local = torch.where(ranks[token] == to[:, None], index[token] - first, -1)  # [P, K]: -1 for other ranks' experts
    sends, receives = _exchange_counts(visits.sum(0), group)
    arrived = exchange(local, group, sends, receives)
    sent = _TakeRows.apply(hidden, token), _TakeRows.apply(weights, token)
    received = ExchangeRows.apply(group, sends, receives, *sent)  # hidden states [N, H], weights [N, K]

    row, choice = (arrived >= 0).nonzero(as_tuple=True)  # [P'] each: pairs of a received token and one of this rank's experts
    inputs, shares = _TakeRows.apply(received[0], row), received[1][row, choice]
    outputs = _compute(_with_local_experts(module, kind, size), kind, inputs, arrived[row, choice], shares)
    sums = _SumRows.apply(outputs, row, len(arrived))
    (returned,) = ExchangeRows.apply(group, receives, sends, sums)
    return _SumRows.apply(returned, token, len(hidden))


def _compute(
    experts: nn.Module, kind: type[nn.Module], inputs: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted outputs [P, H] of P pairs of a token and a local expert.

    inputs [P, H]: the tokens' hidden states. index [P]: the experts. weights [P]: the router's weights.
    """
    if len(inputs):
        return kind.forward(experts, inputs, index[:, None], weights[:, None])
    # `fully_shard` reduces only gradients that exist, so a rank without tokens needs gradients too: zeros, from a pair that is
    # not returned.
    inputs, weights = (torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])]) for tensor in (inputs, weights))
    return kind.forward(experts, inputs, index.new_zeros(1, 1), weights[:, None])[:0]


def _with_local_experts(module: nn.Module, kind: type[nn.Module], count: int) -> nn.Module:
    """Return a view of the module that has only this rank's `count` experts, as plain tensors."""
    view = kind.__new__(kind)
    view.__dict__.update(module.__dict__)
    tensors = module._parameters.items()
    view._parameters = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in tensors}  # pyright: ignore[reportAttributeAccessIssue]
    view.__dict__["num_experts"] = count
    return view


# ---- moving rows --------------------------------------------------------------------------------------------------------


def _exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Return (number of rows that this rank sends to each rank, number of rows that it receives from each rank).

    counts [R]: the first of these.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sends, receives = torch.stack([counts, received]).tolist()
    return sends, receives


def _sum_rows(values: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return [count, ...], whose row i is the sum of the `values` [P, ...] at which `rows` [P] is i. Deterministic."""
    wide = torch.promote_types(values.dtype, torch.float32)
    total = values.new_zeros(count, *values.shape[1:], dtype=wide)
    if total.is_cuda:  # sorts first; index_add_ would sum in any order
        total.index_put_((rows,), values.to(wide), accumulate=True)
    else:  # one row after the other; index_put_ would sum in any order
        total.index_add_(0, rows, values.to(wide))
    return total.to(values.dtype)


class _TakeRows(torch.autograd.Function):
    """Computes tensor[rows], with a deterministic backward pass."""

    @staticmethod
    @override
    def forward(ctx, tensor: torch.Tensor, rows: torch.Tensor):
        ctx.save_for_backward(rows)
        ctx.count = len(tensor)
        return tensor[rows]

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        (rows,) = ctx.saved_tensors
        return _sum_rows(grad, rows, ctx.count), None


class _SumRows(torch.autograd.Function):
    """Differentiable `_sum_rows`."""

    @staticmethod
    @override
    def forward(ctx, values: torch.Tensor, rows: torch.Tensor, count: int):
        ctx.save_for_backward(rows)
        return _sum_rows(values, rows, count)

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        (rows,) = ctx.saved_tensors
        return grad[rows], None, None

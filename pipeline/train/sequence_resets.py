"""Reset, at each packed sequence, the state of modules that mix tokens in other ways than attention ("mixers").

Convolutions, Mamba's state spaces and gated delta nets carry a state from token to token, which must start anew in each
sequence. These modules get each sequence as a row of its own, padded on the right. They are causal, so padding does not change
a sequence's tokens. Sequences of similar lengths share a call, so at most a quarter of the tokens of long sequences is padding.
Only these modules see sequences as rows; the rest of the model sees packed tokens.

With several ranks, no two ranks compute the same sequence. Context- and sequence-parallel ranks hold parts of sequences. They
gather the sequences, each rank computes some of them, and the ranks exchange the results. Without sequence parallelism, all
tensor-parallel ranks hold the same tokens and the whole layer. Each rank computes some sequences, and the results are summed.
Each rank has a part of the gradients of the layer's parameters, which must be summed over the tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from typing_extensions import override

from pipeline.models.family import unsupported_model
from pipeline.train.adapters.linear import AdaptedLinear
from pipeline.train.context_parallel import GatherRows, ScatterRows
from pipeline.train.sequence_bounds import ContextPart, Packing, sequence_order

# Classes of transformers that carry a state and cannot compute rows of sequences, because of their other arguments.
_REFUSED = {"MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock"}
_SHORT = 64  # sequences up to this length share a call: modules pad them to such chunks anyway
# Arguments that say nothing about the tokens, or that rows of whole sequences make unnecessary.
_WITHOUT_EFFECT = {"packing", "position_ids", "position_embeddings", "use_cache", "layer_idx"}


class _Current:
    """Holds the packing of the batch that a layer computes at present."""

    packing: Packing | None = None


def mixers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in `module` that mix tokens in other ways than attention."""
    if type(module).__name__ in _REFUSED or any(isinstance(child, nn.Conv1d) for child in module.children()):
        return [module]
    return [mixer for child in module.children() for mixer in mixers(child)]


def check_mixers(hf: PreTrainedModel) -> None:
    """Raise RecipeError if the model has a state that cannot be reset at each packed sequence."""
    name = type(hf).__name__
    all_mixers = mixers(hf)
    if refused := next((type(m).__name__ for m in all_mixers if type(m).__name__ in _REFUSED), None):
        raise unsupported_model(f"{name} mixes tokens in {refused}, whose state cannot start anew in each packed sequence")
    inside = {id(mixer) for layer in decoder_layers(hf) for mixer in mixers(layer)}
    if any(id(mixer) not in inside for mixer in all_mixers) or (hf._is_stateful and not all_mixers):
        kind = next((type(mixer).__name__ for mixer in all_mixers if id(mixer) not in inside), "a state without a known module")
        raise unsupported_model(
            f"{name} mixes tokens in {kind}, outside of its layers or in an unknown way, so packed sequences would not be"
            " independent"
        )


def decoder_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Return a model's layers: the outermost modules of the classes in `_no_split_modules`, of which Mamba has two, nested."""
    return list(_outermost(hf, frozenset(hf._no_split_modules or ())))


def _outermost(module: nn.Module, classes: frozenset[str]) -> Iterator[nn.Module]:
    if type(module).__name__ in classes:
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, classes)


def is_whole(mixer: nn.Module) -> bool:
    """Return whether every tensor-parallel rank holds a whole mixer, so that the ranks divide its sequences among themselves.

    Call it before `fully_shard`.
    """
    return not any(isinstance(parameter, DTensor) for parameter in mixer.parameters())


def reset_sequences(body: nn.Module, layers: Iterable[nn.Module], tensor: TensorRanks | None = None) -> bool:
    """Change the layers' mixers, in place, so that each sequence is a row of their input. Returns whether there are mixers.

    body: the module that is called with `packing`. tensor: the tensor-parallel ranks; None: no tensor parallelism.
    """
    called = _Current()
    layer_mixers = [(layer, mixer) for layer in layers for mixer in mixers(layer)]
    for layer, mixer in layer_mixers:
        current = _Current()
        ranks = tensor if tensor is not None and (tensor.sequence or is_whole(mixer)) else None
        mixer.forward = functools.partial(_by_sequence, mixer.forward, current, mixer, type(mixer).__name__, ranks)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(layer.forward).parameters.values())
        layer.forward = functools.partial(_with_packing, layer.forward, current, takes_any)
        layer.register_forward_pre_hook(functools.partial(_hand_on, called), with_kwargs=True)
    if layer_mixers:
        body.register_forward_pre_hook(functools.partial(_remember, called), with_kwargs=True)
    return bool(layer_mixers)


def _remember(called: _Current, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    called.packing = kwargs.get("packing")


def _hand_on(called: _Current, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pass the packing to a layer as an argument, because some models do not. Recomputation passes this argument again."""
    return args, {"packing": called.packing, **kwargs}


def _with_packing(forward: Callable, current: _Current, takes_any: bool, *args: Any, packing: Packing | None, **kwargs: Any):
    current.packing = packing
    return forward(*args, **kwargs, **({"packing": packing} if takes_any else {}))


def _by_sequence(
    forward: Callable,
    current: _Current,
    mixer: nn.Module,
    name: str,
    tensor: TensorRanks | None,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute a mixer on packed hidden states [1, T, H] -> [1, T, H'], with one row per sequence."""
    packing = current.packing
    if packing is None:
        raise ValueError(f"the layer of {name} did not get `packing`; its model cannot run on packed sequences")
    unknown = [
        key for key, argument in kwargs.items() if key not in _WITHOUT_EFFECT and argument is not None and argument is not False
    ]
    if unknown or any(argument is not None for argument in args):
        raise ValueError(
            f"{name} gets arguments that sequence resets do not support: {sorted(unknown)}, {len(args)} by position"
        )
    lengths = [length for count, length in packing.runs for _ in range(count)]
    parts = math.prod(group.size() for group in groups_of_parts(tensor, packing.context))
    if hidden_states.shape[:2] != (1, sum(lengths) // parts):
        raise ValueError(f"{name} gets {tuple(hidden_states.shape)} for {sum(lengths)} packed tokens")
    compute = functools.partial(_rows, forward, name)
    if tensor is None and packing.context is None:
        return torch.cat(compute(hidden_states[0].split(lengths), range(len(lengths))))[None]
    draws = any(isinstance(module, AdaptedLinear) and module.drops for module in mixer.modules())
    return compute_shared(compute, hidden_states[0], lengths, tensor, packing.context, draws)[None]


def _rows(forward: Callable, name: str, sequences: Sequence[torch.Tensor], chosen: Sequence[int]) -> list[torch.Tensor]:
    """Return the outputs [L, H'] of the chosen ones of all sequences [L, H]. Sequences of similar lengths share a call.

    chosen: the numbers of these sequences. name: the mixer's class, for errors.
    """
    outputs: dict[int, torch.Tensor] = {}
    for numbers in similar([len(sequences[i]) for i in chosen]):
        together = [chosen[n] for n in numbers]
        rows = forward(pad_sequence([sequences[i] for i in together], batch_first=True))
        if not isinstance(rows, torch.Tensor):
            raise ValueError(f"{name} returns a {type(rows).__name__}; expected one tensor")
        outputs |= {i: row[: len(sequences[i])] for i, row in zip(together, rows.unbind(), strict=True)}
    return [outputs[i] for i in chosen]


def similar(lengths: Sequence[int]) -> list[list[int]]:
    """Return groups of the sequences' numbers. Each length is at least three quarters of its group's longest, or all are short.

    Example: [100, 30, 80, 20] -> [[0, 2], [1, 3]].
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (longest <= _SHORT or 4 * lengths[i] >= 3 * longest):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# ---- sequences of several ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """Tensor-parallel ranks that hold the whole layer."""

    group: dist.ProcessGroup
    sequence: bool  # each has other tokens between blocks (sequence parallelism); False: all have the same


def groups_of_parts(tensor: TensorRanks | None, context: ContextPart | None) -> list[dist.ProcessGroup]:
    """Return the groups whose ranks hold different tokens. The group whose ranks hold the smallest parts comes first."""
    sequence = [tensor.group] if tensor is not None and tensor.sequence else []
    return [*sequence, *([context.group] if context is not None else [])]


def compute_shared(
    compute: Callable[[Sequence[torch.Tensor], Sequence[int]], list[torch.Tensor]],
    hidden: torch.Tensor,
    lengths: list[int],
    tensor: TensorRanks | None,
    context: ContextPart | None,
    draws: bool,
) -> torch.Tensor:
    """Return a layer's outputs [t, H'] for this rank's tokens [t, H]. Each rank computes a share of the whole sequences.

    compute: a function of (all sequences [L, H], the numbers of some of them) that returns the outputs [L, H'] of these.
    lengths: the lengths of all sequences. draws: whether `compute` draws random numbers. If so, each rank draws different
    numbers within it; everywhere else tensor-parallel ranks draw the same numbers.
    """
    parts = groups_of_parts(tensor, context)
    copies = tensor.group if tensor is not None and not tensor.sequence else None
    if copies is not None:
        hidden = Copy.apply(hidden, copies)
    for group in parts:
        hidden = GatherRows.apply(hidden, group)
    order = torch.arange(len(hidden)) if context is None else sequence_order(context.lengths, context.group.size())
    order = order.to(hidden.device, non_blocking=True)
    sequences = hidden[order].split(lengths)
    groups = [*parts, *([copies] if copies is not None else [])]
    ranks, rank = math.prod(group.size() for group in groups), 0
    for group in groups:
        rank = rank * group.size() + group.rank()
    mine = balance_sequences(lengths, ranks)[rank]
    with _own_draws(rank, hidden.device) if draws else contextlib.nullcontext():
        if mine:
            computed = dict(zip(mine, compute(sequences, mine), strict=True))
        else:  # every rank needs gradients of all parameters
            computed = {0: compute([sequences[0][:1]], [0])[0].expand(lengths[0], -1) * 0}
    width = next(iter(computed.values())).size(-1)
    outputs = [computed[i] if i in computed else sequences[i].new_zeros(lengths[i], width) for i in range(len(lengths))]
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    total = torch.cat(outputs)[rows]
    for group in reversed(parts):
        total = ScatterRows.apply(total, group)
    return total if copies is None else _SumCopies.apply(total, copies)


def balance_sequences(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of each rank's sequences. The longest come first, each to the rank with the fewest tokens so far.

    Example: [5, 9, 3, 2], 2 ranks -> [[1], [0, 2, 3]].
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        min(shares, key=lambda share: sum(lengths[j] for j in share)).append(i)
    return shares


@contextlib.contextmanager
def _own_draws(rank: int, device: torch.device) -> Iterator[None]:
    """Within this context, this rank's generators draw other numbers than other ranks' do.

    Afterwards the generators continue in the same state on all ranks.
    """
    seed = int(torch.randint(1 << 62, ()))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + rank)
        yield


class Copy(torch.autograd.Function):
    """Returns rows that are the same on all ranks of a group; the backward pass sums the gradients of the ranks."""

    @staticmethod
    @override
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumCopies(torch.autograd.Function):
    """Sums the rows of a group's ranks. The gradient of the sum, equal on all ranks, is the gradient of each rank's rows."""

    @staticmethod
    @override
    def forward(ctx, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        rows = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(rows, group=group)
        return rows

    @staticmethod
    @override
    def backward(ctx, grad: torch.Tensor):
        return grad, None

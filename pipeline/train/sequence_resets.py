"""Reset, at each packed sequence, the state of modules that mix tokens in other ways than attention ("mixers").

Convolutions, Mamba's state spaces and gated delta nets carry a state from token to token, which must start anew in each
sequence. These modules get each sequence as a row of its own, padded on the right. They are causal, so padding does not change
a sequence's tokens. Sequences of similar lengths share a call, so at most a quarter of the tokens of long sequences is padding.

Only these modules see sequences as rows; the rest of the model sees packed tokens. Under context, sequence and tensor
parallelism, ranks divide the sequences of a batch among themselves: see sequence_sharing.py.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from pipeline.models.family import unsupported_model
from pipeline.train.adapters.linear import AdaptedLinear
from pipeline.train.sequence_bounds import Packing
from pipeline.train.sequence_sharing import TensorRanks, compute_shared, groups_of_parts

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

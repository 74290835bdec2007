"""torch.compile of decoder layers (policy.dtensor_cfg.compile): one graph for all layers and all batch lengths.

Each layer's `forward` is compiled before `fully_shard` adds its hooks, as in torchtitan. All dimensions of inputs are dynamic
from the start. Those that must match a parameter become static again, so only the number of tokens varies (a batch of one token
is a separate case). Attention stays eager, because it loops over the lengths of the sequences. A layer is therefore two graphs,
before and after attention.

Passes without gradients run the same graph as training and drop its saved activations layer by layer. So the policy's log-probs
before an update are bitwise equal to those in its first loss, as in eager mode, and nothing is compiled twice.

The compiler splits reductions by the sizes of the first batch. Trial batches of fixed sizes, when the model is built, make this
choice the same in every start. Inductor's deterministic mode makes no choice by timing. So on the same machine, a resumed run
equals the uninterrupted one on CPUs, or with policy.deterministic, which makes attention deterministic too. Elsewhere Inductor
times its kernels and takes the fastest.

Not supported: tensor parallelism (torch 2.13 fails to trace its DTensor hooks with dynamic shapes: RecursionError), and
selective recomputation, which cannot select operators inside compiled graphs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from pipeline.config import PolicyConfig, Problem, RecipeError, compiles, trial_lengths
from pipeline.train.kernels import NEEDS, missing_dependency
from pipeline.train.packed_attention import NAME, packed_attention
from pipeline.types import PackedBatch

logger = logging.getLogger(__name__)

KEY = "policy.dtensor_cfg.compile"
DEVICES = ("cuda",)  # device types that compile by default


def should_compile(policy: PolicyConfig, device: torch.device, mixture: bool) -> bool:
    """Return whether to compile layers: the key's value, or, if it is null, true on GPUs for models that are known to compile.

    If the key is null and layers could be compiled, the call is collective over the default group: all ranks compile or none
    does, because compiled layers run trial batches. If a rank cannot compile, rank 0 logs which rank and why. Raises
    RecipeError if the key is true and this rank cannot compile the model.
    """
    requested, tensor_size = policy.dtensor_cfg.compile, policy.dtensor_cfg.tensor_parallel_size
    if not (compiles(policy, mixture) if device.type in DEVICES else requested):
        return False
    if requested and tensor_size > 1:
        message = f"got true with policy.dtensor_cfg.tensor_parallel_size={tensor_size}; expected 1. Try false"
        raise RecipeError(Problem(KEY, "unsupported", message))
    lacking = missing_dependency(device)
    if requested:
        if lacking:
            message = f"got true, but there is no {lacking}. Install it, or try false"
            raise RecipeError(Problem(KEY, "not-installed", message))
        return True
    first = _first_rank_without(lacking, device)
    if first and dist.get_rank() == 0:
        logger.warning("%s: layers run eagerly, because rank %d of this component has no %s", KEY, *first)
    return first is None


def _first_rank_without(lacking: str | None, device: torch.device) -> tuple[int, str] | None:
    """Return (rank, missing dependency) of the first rank that lacks one; None if no rank does. Collective."""
    nobody = dist.get_world_size() * len(NEEDS)
    mine = nobody if lacking is None else dist.get_rank() * len(NEEDS) + NEEDS.index(lacking)
    least = torch.tensor(mine, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    rank, need = divmod(int(least), len(NEEDS))
    return None if least == nobody else (rank, NEEDS[need])


def compile_layers(layers: Iterable[nn.Module], deterministic: bool) -> None:
    """Replace the forward of each layer by one that is compiled at its first call.

    deterministic: whether Inductor makes no choice by timing kernels.
    """
    # Without this, the graph break at attention would also split off the layer's norms and residual additions.
    torch._dynamo.config.nested_graph_breaks = True
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    for layer in layers:
        layer.forward = _in_one_mode(torch.compile(layer.forward, dynamic=True, options={"deterministic": deterministic}))


def _in_one_mode(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a compiled layer so that gradients are enabled and its input requires them at every call: it is compiled once."""

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wants_grad = torch.is_grad_enabled()
        with torch.enable_grad():
            if not (wants_grad and hidden.requires_grad):
                hidden = hidden.detach().requires_grad_()
            # Always a view: Dynamo compiles views separately, and `fully_shard` passes a view.
            output = layer(hidden.view_as(hidden), *args, **kwargs)
        return output if wants_grad else output.detach()

    return forward


@contextlib.contextmanager
def explain_out_of_memory(policy: PolicyConfig) -> Iterator[None]:
    """Within this context, add a note to torch.OutOfMemoryError that explains the trial batches and names the keys to try."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        longest = policy.max_total_sequence_length
        error.add_note(
            f"{KEY}: compiled layers first run a full microbatch of sequences of"
            f" policy.max_total_sequence_length={longest} tokens. Try {KEY}=false if the data have no such sequences, else"
            " smaller microbatches or policy.dtensor_cfg.activation_checkpointing=true"
        )
        raise


def trial_batches(policy: PolicyConfig, device: torch.device) -> Iterator[PackedBatch]:
    """Yield a full microbatch of the longest sequences, then one of two tokens.

    For few tokens Inductor may need another graph: its C++ code sums more than 4,096 numbers in another way than fewer.
    """
    for lengths in (trial_lengths(policy), (2,)):
        positions = torch.arange(lengths[0], device=device).repeat(len(lengths))
        zeros = torch.zeros(len(positions), device=device)
        yield PackedBatch(
            tokens=torch.zeros_like(positions),
            positions=positions,
            cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device),
            lengths=lengths,
            loss_mask=zeros.bool(),
            generate_logprobs=zeros,
            advantages=zeros,
            rewards=zeros[: len(lengths)],
        )

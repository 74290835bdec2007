"""torch.compile of decoder layers (policy.dtensor_cfg.compile): one graph for every layer and every length of a batch.

Each layer's `forward` is compiled, before `fully_shard` puts its hooks around it, as torchtitan does. All dimensions of inputs
are dynamic from the start; those that meet a parameter become static again, so only the number of tokens varies (a batch of one
token is a case of its own). Attention stays eager, because it loops over the lengths of the sequences: a layer is two graphs,
before and after it.

Passes without gradients run the same graph as training and drop what it saved, layer by layer. So log-probs of the policy
before an update equal those in its first loss to the last bit, as they do in eager mode, and nothing is compiled twice.

How the compiler cuts reductions depends on the sizes that it first sees. Trial passes at fixed sizes, when the model is
built, make that choice the same in every start, and Inductor's deterministic mode decides nothing by timing: on the same
machine a resumed run equals the uninterrupted one.

Left out: tensor parallelism (torch 2.13 fails to trace its DTensor hooks with dynamic shapes: RecursionError), and selective
recomputation, which does not see into compiled graphs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface

from pipeline import builds
from pipeline.config import PolicyConfig
from pipeline.train.packed_attention import NAME, Packing, packed_attention

KEY = "policy.dtensor_cfg.compile"
OPTIONS = {"deterministic": True}  # Inductor's
DEVICES = ("cuda",)  # where null compiles
GCC = "C compiler (gcc, clang or CC)"
GXX = "C++ compiler (g++ or CXX)"
TRITON = "triton that supports this GPU"
PATH = "PyTorch in a folder whose path has no spaces"
NEEDS = (GCC, GXX, TRITON, PATH)  # of Inductor, whatever the device


def should_compile(policy: PolicyConfig, device: torch.device, mixture: bool) -> bool:
    """Return whether to compile layers: as the key says, or, where it is null, on GPUs what is known to compile.

    Where null would compile, the call is collective over the default group: all ranks compile or none does, since compiled
    layers have trial passes. If one cannot, the first rank prints which one and why. Raise ValueError where the key is true
    and the model cannot be compiled on this rank.
    """
    dtensor, asked = policy.dtensor_cfg, policy.dtensor_cfg.compile
    tensor_size, selective = dtensor.tensor_parallel_size, dtensor.recompute_granularity == "selective"
    others = mixture or tensor_size > 1 or selective or dtensor.use_liger_kernel
    if asked is False or (asked is None and (device.type not in DEVICES or others)):
        return False
    if asked and tensor_size > 1:
        raise ValueError(f"{KEY}: got true with policy.dtensor_cfg.tensor_parallel_size={tensor_size}; expected 1. Try false")
    lacking = missing_dependency(device)
    if asked:
        if lacking:
            raise ValueError(f"{KEY}: got true, but there is no {lacking}; expected one. Install it, or try false")
        return True
    first = _first_rank_without(lacking, device)
    if first and dist.get_rank() == 0:
        print(f"hetstep: {KEY}: layers run eagerly, because rank {first[0]} of this component has no {first[1]}", flush=True)
    return first is None


def _first_rank_without(lacking: str | None, device: torch.device) -> tuple[int, str] | None:
    """Return the first rank of the default group that lacks something, and what; None if no rank does. Collective."""
    none = dist.get_world_size() * len(NEEDS)
    mine = none if lacking is None else dist.get_rank() * len(NEEDS) + NEEDS.index(lacking)
    least = torch.tensor(mine, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    rank, what = divmod(int(least), len(NEEDS))
    return None if least == none else (rank, NEEDS[what])


def missing_dependency(device: torch.device) -> str | None:
    """Return which of NEEDS Inductor lacks on this machine for such a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            return TRITON
        # As triton/runtime/build.py looks for it.
        return None if "CC" in os.environ or shutil.which("gcc") or shutil.which("clang") else GCC
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return GXX
    return None if builds.inductor_links(torch.__file__) else PATH


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile the forward of each layer, in place, when it is first called."""
    import torch._dynamo

    # Otherwise the break at attention would also split the layer's norms and residual additions off.
    torch._dynamo.config.nested_graph_breaks = True
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    for layer in layers:
        layer.forward = _in_one_mode(torch.compile(layer.forward, dynamic=True, options=OPTIONS))


def _in_one_mode(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the layer with gradients enabled and wanted of its input at every call, so that it is compiled for that alone."""

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = torch.is_grad_enabled()
        with torch.enable_grad():
            if not (kept and hidden.requires_grad):
                hidden = hidden.detach().requires_grad_()
            # A view at every call: Dynamo compiles views and others apart, and what `fully_shard` hands on is one.
            output = layer(hidden.view_as(hidden), *args, **kwargs)
        return output if kept else output.detach()

    return forward


@contextlib.contextmanager
def explain_out_of_memory(policy: PolicyConfig) -> Iterator[None]:
    """Add to torch.OutOfMemoryError of the trial passes what they are and which keys to try."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        longest = policy.max_total_sequence_length
        error.add_note(
            f"{KEY}: compiled layers are tried out with a full microbatch of sequences of"
            f" policy.max_total_sequence_length={longest} tokens. Try {KEY}=false if the data have no such sequences, else"
            " smaller microbatches or policy.dtensor_cfg.activation_checkpointing=true"
        )
        raise


def trial_batches(policy: PolicyConfig, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor, Packing]]:
    """Yield (tokens [T], positions [T], packing) of a full microbatch of the longest sequences, then of two tokens.

    For few tokens Inductor may want another graph: its C++ adds up more than 4,096 numbers otherwise than fewer.
    """
    longest, packing = policy.max_total_sequence_length, policy.sequence_packing
    count = max(1, packing.train_mb_tokens // longest) if packing.enabled else policy.train_micro_batch_size
    for lengths in ((longest,) * count, (2,)):
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        positions = torch.arange(lengths[0], device=device).repeat(len(lengths))
        yield torch.zeros_like(positions), positions, Packing.of_lengths(lengths, ends)

"""Features of PyTorch that train ranks call and that differ between builds: releases 2.11 to 2.13, and NVIDIA's in between.

The features themselves are tested, never the version: NVIDIA's "2.13.0a0" may lack features of the release 2.13.0. The node
checks refuse a build that lacks a needed feature, before anything is loaded.

    torch 2.11    varlen_attn has no enable_gqa; its kernel takes fewer key heads than query heads without it
    torch 2.12    varlen_attn refuses fewer key heads without enable_gqa
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable
from inspect import Parameter
from typing import Any

import torch

RELEASES = "2.11 to 2.13"
_PACKED = "query key value cu_seq_q cu_seq_k max_q max_k"
NEEDED = {
    "torch.nn.attention.varlen:varlen_attn": f"{_PACKED} scale window_size",
    "torch:ops.torch_attn._varlen_attn": f"{_PACKED} is_causal scale window_size",
    "torch:ops.torch_attn._varlen_attn_backward": f"grad_out {_PACKED} out lse is_causal rng_state scale window_size",
    "torch.nn.attention.flex_attention:flex_attention": "query key value score_mod block_mask scale enable_gqa return_aux",
    "torch.nn.attention:activate_flash_attention_impl": "impl",
    "torch.nn.attention:current_flash_attention_impl": "",
    "torch.distributed.fsdp:fully_shard": "module mesh reshard_after_forward mp_policy offload_policy ignored_params",
    "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor": "self factor",
    "torch.distributed.fsdp:FSDPModule.set_force_sum_reduction_for_comms": "self enable",
    "torch._dynamo:config.nested_graph_breaks": "",
}
"""What train ranks call, as module:name -> the arguments that they pass."""


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return whether this build's function has the argument."""
    return argument in _signature(function).parameters


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if not isinstance(function, torch._ops.OpOverloadPacket):
        return inspect.signature(function)
    kind, empty = Parameter.KEYWORD_ONLY, Parameter.empty
    arguments = function.default._schema.arguments
    return inspect.Signature([Parameter(a.name, kind, default=None if a.has_default_value() else empty) for a in arguments])


def lacking() -> list[str]:
    """Return the features in NEEDED that this build lacks, such as "torch.nn.attention.varlen.varlen_attn (missing ...)"."""
    found = []
    for name, arguments in NEEDED.items():
        try:
            thing = pkgutil.resolve_name(name)
            if callable(thing):
                _signature(thing).bind(**dict.fromkeys(arguments.split()))
        except (ImportError, AttributeError):
            found.append(name.replace(":", "."))
        except TypeError as error:  # of `bind`
            found.append(f"{name.replace(':', '.')} ({error})")
    return found

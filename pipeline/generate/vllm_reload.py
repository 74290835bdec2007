"""Replacing all weights of a live vLLM model in place, from tensors by Hugging Face name.

vLLM's layer-wise reload does the work: it takes each layer back to the parameters that its checkpoint loader knows, loads,
processes as after a first load, and copies the result into the storage in use, so CUDA graphs stay valid. This adds what that
reload lacks in vLLM 0.32: it leaves two packed copies stale on CPU, and nothing puts the live tensors back when it is broken
off. Uses private functions of vLLM's reload; the version is pinned. Left out: receiving only this rank's shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.v1.worker.worker_base import WorkerBase


@torch.no_grad()
def reload(worker: WorkerBase, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load `weights` into the worker's model. On every rank of the engine; `weights` may raise.

    On an error the model holds a mixture of old and new weights, in tensors that a later reload can fill. Raises ValueError if
    some parameter of the model was not loaded.
    """
    model, config = worker.model_runner.get_model(), worker.vllm_config
    # It warns of every layer that only has buffers, at every reload; a parameter left out is an error below.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    names = {name for name, _ in model.named_parameters()}  # before the reload takes them away
    with set_current_vllm_config(config):
        try:
            initialize_layerwise_reload(model)
            loaded = model.load_weights(weights)
            # Quantised layers have parameters (scales) that no checkpoint of the policy holds.
            if loaded is not None and config.model_config.quantization is None and (missed := names - loaded):
                raise ValueError(f"vLLM did not load {len(missed)} of its parameters, the first is '{min(missed)}'")
            finalize_layerwise_reload(model, config.model_config)
        except BaseException:
            _put_back(model)
            raise
        if current_platform.is_cpu():
            _repack(model)


def _put_back(model: torch.nn.Module) -> None:
    """Give every layer that is still between two states its live tensors again."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def _repack(model: torch.nn.Module) -> None:
    """Bring the copies up to date that CPU kernels read instead of the parameters.

    A tied lm_head is never loaded itself, so the reload does not process it; and the reload calls an MoE layer's processing,
    which on an update leaves out the packing of experts for the CPU kernel.
    """
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            tied = owners.setdefault(id(parameter), layer) is not layer
            if tied and isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(kernel.fused_experts, "isa"):
            kernel.fused_experts.process_weights_after_loading(layer)

"""Replace all weights of a live vLLM model in place, from full tensors by Hugging Face name.

vLLM's layer-wise reload does the work: it restores each layer's raw parameters, loads them, processes them as after a first
load, and copies the result into the storage in use, so CUDA graphs stay valid. In vLLM 0.32 that reload leaves two packed
copies stale on a CPU, and does not restore the live tensors after an error. This module does both. It uses private functions of
vLLM's reload; the version is pinned. To receive only this rank's shard see `vllm_update.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from pipeline.generate.vllm_layout import VLLMModel, check_loaded, restore_live_tensors


@torch.no_grad()
def reload(model: VLLMModel, config: VllmConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load `weights` into a worker's model. Collective over the ranks of the engine. Iterating over `weights` may raise.

    After an error the model holds a mixture of old and new weights, in tensors that a later reload can fill. Raises ValueError
    if a parameter of the model was not loaded.
    """
    # vLLM warns at every reload about every layer that only has buffers. A missing parameter is an error below.
    logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
    live = {name for name, _ in model.named_parameters()}  # without tied copies
    with set_current_vllm_config(config):
        try:
            initialize_layerwise_reload(model)
            before = {name for name, _ in model.named_parameters()}  # without those that processing created
            loaded = model.load_weights(weights)
            # Quantised layers have parameters (scales) that no checkpoint of the policy holds.
            complete = config.model_config.quantization is None
            created = {name for name, _ in model.named_parameters()} - before - live
            check_loaded(loaded if complete else None, live & before, created)
            finalize_layerwise_reload(model, config.model_config)
        except BaseException:
            for layer in model.modules():
                restore_live_tensors(layer)
            raise
        if current_platform.is_cpu():
            pack_embeddings(model)
            for layer in model.modules():
                pack_experts(layer)


def pack_experts(layer: torch.nn.Module) -> None:
    """Pad and pack a layer of experts for the CPU kernel. vLLM's own processing skips this on an update."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    if kernel is not None and hasattr(kernel.fused_experts, "isa"):
        kernel.fused_experts.process_weights_after_loading(layer)


def pack_embeddings(model: torch.nn.Module) -> None:
    """Update the packed copy that the CPU kernel reads instead of lm_head.

    Any embedding may serve as lm_head, and a tied lm_head is never loaded itself.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if type(method) is UnquantizedEmbeddingMethod:
            method.process_weights_after_loading(layer)

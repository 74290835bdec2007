"""A vLLM engine that gives back its GPU's memory between rollouts, and gets it back at the same addresses.

At vLLM's level 2 weights, keys and values and scratch are dropped. Buffers (rotary tables, attention's scales) and the
parameters named in SLEEP_ARGUMENTS go to the host and come back with the weights; what belongs to no model (the runner's state,
CUDA graphs, NCCL's buffers) stays on the GPU, or vLLM saves it. The next refit makes the scales of quantised weights anew.
This adds what vLLM does not save though it lies in the weights' memory: tensors that modules and their attention kernels keep
beside parameters and buffers, such as ALiBi slopes. At level 1 the weights' whole memory goes to the host and comes back.

Each rank of an engine sleeps for itself: under `external_launcher` vLLM asks no other. One engine per process can sleep. On
CPU vLLM has no sleep: the memory stays, and nothing is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.generate.engine_state import MemoryPart

# Engine arguments. A draft's weights are no part of a refit, so they must survive.
SLEEP_ARGUMENTS: dict[str, Any] = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"]}


class SleepMode:
    """Of one engine and its rank's model."""

    def __init__(self, engine: LLMEngine, model: torch.nn.Module) -> None:
        self._engine, self._model = engine, model
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and its copy on the host

    def sleep(self, keep_weights: bool) -> None:
        """Nothing is pending. Raises RuntimeError if the engine was built to stay awake."""
        if not current_platform.is_cuda():
            return
        if not self._engine.model_config.enable_sleep_mode:
            raise RuntimeError("sleep: this engine was built to stay awake; set policy.generation.colocated.enabled=true")
        if not keep_weights:
            self._saved = [(tensor, tensor.cpu()) for tensor in unregistered_tensors(self._model) if not tensor.is_cpu]
        self._engine.sleep(level=1 if keep_weights else 2)

    def wake(self, part: MemoryPart) -> None:
        if not current_platform.is_cuda():
            return
        self._engine.wake_up(tags=[{"weights": "weights", "cache": "kv_cache"}[part]])
        for tensor, copy in self._saved:
            tensor.data.copy_(copy)  # .data: what was made in inference mode may not be written to outside of it
        self._saved = []


def unregistered_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tensors that modules, and the attention implementations of modules, hold as plain attributes, but for those that share
    memory with a parameter, a buffer, or the keys and values, which vLLM binds to each attention layer."""
    caches = tree_leaves([module.__dict__.get("kv_cache") for module in model.modules()])
    listed = {
        _memory(tensor) for tensor in [*model.parameters(), *model.buffers(), *caches] if isinstance(tensor, torch.Tensor)
    }
    holders = [holder for module in model.modules() for holder in (module, module.__dict__.get("impl")) if holder is not None]
    held = [value for holder in holders for value in vars(holder).values()]
    found = {id(value): value for value in held if isinstance(value, torch.Tensor)}
    return [tensor for tensor in found.values() if _memory(tensor) not in listed]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

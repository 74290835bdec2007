"""Release the GPU memory of a vLLM engine between rollouts, and allocate it again at the same addresses.

At vLLM's sleep level 2, weights, KV cache and scratch memory are dropped. Buffers (rotary tables, attention's scales) and the
parameters named in SLEEP_ARGUMENTS are copied to the host and return with the weights. State outside the models (the runner's
state, CUDA graphs, NCCL's buffers) stays on the GPU, or vLLM saves it. The next refit recomputes the scales of quantized
weights. Modules and their attention kernels also keep tensors that are neither parameters nor buffers, such as ALiBi slopes.
They lie in the weights' memory, and vLLM does not save them, so this module does. At level 1 the whole memory of the weights is
copied to the host and returns.

Each rank of an engine sleeps for itself: under `external_launcher` vLLM calls no other rank. Only one engine per process can
sleep. On CPU vLLM has no sleep mode: the memory stays, and nothing is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.generate.engine_state import MemoryPart

# Engine arguments. A draft model's weights are not refitted, so they must be preserved.
SLEEP_ARGUMENTS: dict[str, Any] = {"enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"]}


class SleepMode:
    """Sleep and wake-up of one engine and its rank's model."""

    def __init__(self, engine: LLMEngine, model: torch.nn.Module) -> None:
        self._engine, self._model = engine, model
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # (tensor, its copy on the host)

    def sleep(self, keep_weights: bool) -> None:
        """Release memory while no request is pending. Raises RuntimeError if the engine was built without sleep mode."""
        if not current_platform.is_cuda():
            return
        if not self._engine.model_config.enable_sleep_mode:
            raise RuntimeError("sleep: this engine was built without sleep mode. Try policy.generation.colocated.enabled=true.")
        if not keep_weights:
            self._saved = [(tensor, tensor.cpu()) for tensor in unregistered_tensors(self._model) if not tensor.is_cpu]
        self._engine.sleep(level=1 if keep_weights else 2)

    def wake(self, part: MemoryPart) -> None:
        """Allocate one part again, and copy the saved tensors back."""
        if not current_platform.is_cuda():
            return
        self._engine.wake_up(tags=[{"weights": "weights", "cache": "kv_cache"}[part]])
        for tensor, copy in self._saved:
            tensor.data.copy_(copy)  # .data: a tensor made in inference mode may not be written outside of it
        self._saved = []


def unregistered_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that modules and their attention implementations hold as plain attributes.

    Tensors that share memory with a parameter, a buffer or the KV cache (which vLLM binds to attention layers) are left out.
    """
    caches = tree_leaves([module.__dict__.get("kv_cache") for module in model.modules()])
    registered = {
        _memory(tensor) for tensor in [*model.parameters(), *model.buffers(), *caches] if isinstance(tensor, torch.Tensor)
    }
    holders = [holder for module in model.modules() for holder in (module, module.__dict__.get("impl")) if holder is not None]
    attributes = [value for holder in holders for value in vars(holder).values()]
    tensors = {id(value): value for value in attributes if isinstance(value, torch.Tensor)}
    return [tensor for tensor in tensors.values() if _memory(tensor) not in registered]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

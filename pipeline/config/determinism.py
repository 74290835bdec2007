"""`policy.deterministic`: on GPUs, a run computes the same bits each time, with the same images, GPUs and layout.

Without this key two runs differ: attention's backward pass and sums by index use atomic additions, in any order; NCCL may sum
in the switch; vLLM's kernels split their sums by the batch. On CPUs every run is deterministic. There the key only refuses the
operations that it refuses on GPUs.

This file has the environment variables, which ranks get before Python starts (`launch/executors/components.py`), and refuses
recipes whose other choices contradict the key. The other parts:
    pipeline/train/kernels.py             torch and Inductor, in every process that trains or scores
    pipeline/train/megatron/model.py      TransformerConfig.deterministic_mode
    launch/preflight/architecture.py      refuses models whose layers have no deterministic kernels
    launch/plan/roofline.py                    the price

By their source, these kernels are deterministic without a switch: Liger's norms, rotary embeddings and MLPs (no atomics in
src/liger_kernel/ops); flex attention (separate programs sum dQ, dK and dV: torch/_inductor/kernel/flex/templates);
TransformerEngine's fused permutation (transformer_engine/pytorch/permutation.py). TransformerEngine selects among its
attention kernels those that are deterministic (dot_product_attention/utils.py, "Filter: Determinism"), and so does vLLM
(vllm/v1/attention/backend.py, `supports_batch_invariance`). FlashAttention-3 takes torch's switch (torch/nn/attention/_fa3.py)
and raises for heads of 256 numbers (hopper/flash_api.cpp).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from pipeline.config import hardware
from pipeline.config.cluster import ComponentConfig
from pipeline.config.schema import Recipe, uses_megatron
from pipeline.recipe.problems import Problem, RecipeError

KEY = "policy.deterministic"
SHARED = {
    # cuBLAS then uses one workspace for each stream; read when its first handle is made. torch refuses cuBLAS without it.
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # A ring's order of additions is fixed by the topology; sums in the switch (NVLS) vary from call to call
    # (https://github.com/NVIDIA/nccl/issues/1497), and a tree may be another one in each start. Megatron-LM requires it too
    # (docs/user-guide/deterministic-training.md). Ranks of both components share communicators, so all have the same value.
    "NCCL_ALGO": "Ring",
}
OF_TRAINING = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}  # TransformerEngine: docs/envvars.rst
OF_ENGINES = {
    "VLLM_BATCH_INVARIANT": "1",  # https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/; some modules read it at import
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # no choice of a kernel by its time: torch/_inductor/config.py
}
ENGINES = ("generate", "judge")
"""Components whose ranks are engines."""
LEAST_CAPABILITY = 8.0  # of vLLM's batch invariance, see the page above
CORE_OVERRIDES = {"deterministic_mode": True, "tp_comm_overlap": False}
"""Arguments of TransformerConfig -> the value that Megatron-LM requires (megatron/training/determinism.py)."""
NO_KERNEL = re.compile(r"(\S+(?: with floating point input)?) does not have a deterministic implementation")


def variables(recipe: Recipe, component: str) -> dict[str, str]:
    """Return the environment variables of a component's ranks; {} if the key is false or the ranks have no GPUs."""
    if not (recipe.policy.deterministic and getattr(recipe.cluster, component).gpus_per_node):
        return {}
    return SHARED | (OF_ENGINES if component in ENGINES else OF_TRAINING)


def problems(recipe: Recipe, components: Mapping[str, ComponentConfig]) -> Iterator[Problem]:
    """Yield a problem for each choice of the recipe with which runs on GPUs would differ. components: the job's components."""
    if not recipe.policy.deterministic:
        return
    for name, component in components.items():
        if component.gpus_per_node:
            yield from _check_variables(recipe, name, component)
            if name in ENGINES:
                yield from _check_engine(recipe, name, component)
    train = components.get("train")
    if train and train.gpus_per_node and uses_megatron(recipe.policy):
        for name, expected in CORE_OVERRIDES.items():
            if (value := recipe.policy.megatron_cfg.model_overrides.get(name, expected)) != expected:
                yield _contradiction(f"policy.megatron_cfg.model_overrides.{name}", value, expected)


def _check_variables(recipe: Recipe, name: str, component: ComponentConfig) -> Iterator[Problem]:
    """Yield a problem for each environment variable of the recipe that would override one of `variables`."""
    for variable, expected in variables(recipe, name).items():
        if (value := component.env_vars.get(variable, expected)) != expected:
            yield _contradiction(f"cluster.{name}.env_vars.{variable}", value, expected)


def _check_engine(recipe: Recipe, name: str, component: ComponentConfig) -> Iterator[Problem]:
    if recipe.policy.generation.backend != "vllm":
        key = "policy.generation.backend"
        message = (
            f"got true with {key}=transformers on GPUs; expected vllm, since an answer of transformers depends on the other"
            f" answers of its batch. Try {key}=vllm, or {KEY}=false"
        )
        yield Problem(KEY, "contradiction", message)
    elif (capability := hardware.gpu_value(component.gpu, "compute_capability")) < LEAST_CAPABILITY:
        message = (
            f"got true with cluster.{name}.gpu={component.gpu}, of compute capability {capability}; expected at least"
            f" {LEAST_CAPABILITY}, which vLLM's deterministic kernels need. Try {KEY}=false"
        )
        yield Problem(KEY, "unsupported", message)


def _contradiction(key: str, value: object, expected: object) -> Problem:
    message = f"got true with {key}={value}; expected {expected}. Try without it, or {KEY}=false"
    return Problem(KEY, "contradiction", message)


@contextlib.contextmanager
def named_operators() -> Iterator[None]:
    """Raise RecipeError in place of torch's error on an operator without a deterministic kernel. It names key and operator."""
    try:
        yield
    except RuntimeError as error:
        if not (match := NO_KERNEL.search(str(error))):
            raise
        message = (
            f"got true, but this run needs {match[1]}, for which torch has no deterministic kernel; expected another operator"
            f" in its place. Try {KEY}=false"
        )
        raise RecipeError(Problem(KEY, "unsupported", message)) from error

"""Kernels that a recipe or a machine selects: deterministic ones, Liger's, FlashAttention-3, and those of torch's compiler.

Liger's are in layers, where a recipe selects them; FlashAttention-3 is in attention, where it is installed. Neither of these
two has been tested on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch
import torch.utils.deterministic
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.config.hardware import HOPPER
from pipeline.node import builds, c_compiler

logger = logging.getLogger(__name__)

KEY = "policy.dtensor_cfg"


def use_kernels(policy: PolicyConfig, hf: PreTrainedModel, device: torch.device) -> None:
    """Make `hf` use the kernels of the recipe. Raises RecipeError where a kernel that the recipe selects is not available.

    FlashAttention-3 and Liger then stay in use for the whole process: FlashAttention-3 replaces operators of torch, and Liger
    replaces the rotary embedding of all models of the family.
    """
    attention = policy.dtensor_cfg.flash_attention
    if policy.dtensor_cfg.use_liger_kernel:
        _check_device("use_liger_kernel", "true", device, "false")
        _liger(hf)
    if attention == 3:
        _check_device("flash_attention", "3", device, "2")
        _flash_attention_3(device)
    elif attention is None and not policy.deterministic and _has_flash_attention_3(device):
        try:
            _flash_attention_3(device)
        except (ImportError, OSError, RuntimeError) as error:  # a build for another torch
            logger.warning("%s.flash_attention: 2, because FlashAttention-3 does not load: %s", KEY, error)


def _check_device(name: str, value: str, device: torch.device, alternative: str) -> None:
    if device.type != "cuda":
        raise _problem(name, "needs-gpu", f"got {value} on {device.type}; expected a GPU. Try {alternative}")


def _problem(name: str, code: str, message: str) -> RecipeError:
    return RecipeError(Problem(f"{KEY}.{name}", code, message))


def _liger(hf: PreTrainedModel) -> None:
    """Replace the model's norms, rotary embeddings and MLPs by Liger's.

    The head stays ours, because of the temperature and the shards of the vocabulary.
    """
    key = "use_liger_kernel"
    if importlib.util.find_spec("liger_kernel") is None:
        message = "got true, but liger_kernel is not installed. Try pip install '.[liger]', or false"
        raise _problem(key, "not-installed", message)
    # An optional package: the check above comes first.
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # pyright: ignore[reportMissingImports]

    apply: Callable[..., None] | None = MODEL_TYPE_TO_APPLY_LIGER_FN.get(hf.config.model_type)
    if apply is None:
        message = f"got true for a model of type {hf.config.model_type}, which Liger does not support. Try false"
        raise _problem(key, "unsupported", message)
    apply(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)


def _has_flash_attention_3(device: torch.device) -> bool:
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER
    return on_hopper and importlib.util.find_spec("flash_attn_interface") is not None


def _flash_attention_3(device: torch.device) -> None:
    key = "flash_attention"
    if importlib.util.find_spec("flash_attn_interface") is None:
        message = "got 3, but FlashAttention-3's package flash_attn_interface is not installed. Install it, or try 2"
        raise _problem(key, "not-installed", message)
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:  # as torch/nn/attention/_fa3.py requires
        message = f"got 3 on a GPU of compute capability {major}.{minor}; expected Hopper, {HOPPER}.0. Try 2"
        raise _problem(key, "unsupported", message)
    if current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")


# ---- torch's compiler -------------------------------------------------------------------------------------------------------


GXX = "C++ compiler (g++ or CXX)"
TRITON = "triton that supports this GPU"
PATH = "PyTorch in a folder whose path has no spaces"
NEEDS = (c_compiler.COMPILER, c_compiler.HEADER, GXX, TRITON, PATH)  # Inductor's dependencies, for any device


def missing_dependency(device: torch.device) -> str | None:
    """Return the entry of NEEDS that Inductor lacks on this machine for this type of device; None if it lacks none."""
    if device.type == "cuda":
        return c_compiler.missing() if has_triton() else TRITON
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        return GXX
    if not c_compiler.has_header(compiler, "c++"):
        return c_compiler.HEADER
    return None if builds.inductor_links(torch.__file__) else PATH


def make_deterministic() -> None:
    """Use torch's deterministic kernels from now on, in all models of the process.

    `pipeline/config/determinism.py` has the other switches of policy.deterministic.

    An operator that has no deterministic kernel raises an error. With warn_only, which only warns, torch's attention would keep
    the backward pass that adds atomically (attention_backward.cu, "To explicitly enable determinism"). The same switch sets
    Inductor's deterministic mode, the choice of cuDNN's convolutions, and the branches of Megatron-Core that sum by index
    (megatron/core/transformer/moe/moe_utils.py).
    """
    torch.use_deterministic_algorithms(True)
    # Otherwise every torch.empty would be filled, so that reading it before writing shows. That costs memory bandwidth.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - a property of the module's class

"""Kernels for GPUs that a recipe may ask for beside torch's own: Liger's in layers, FlashAttention-3 in attention.

Neither has been run by us on a GPU yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from transformers import PreTrainedModel

from pipeline.config import PolicyConfig
from pipeline.config.hardware import HOPPER

KEY = "policy.dtensor_cfg"


def use_kernels(policy: PolicyConfig, hf: PreTrainedModel, device: torch.device) -> None:
    """Make `hf` compute by the kernels that the recipe asks for. Raise ValueError where they are not to be had.

    Both last for the process: FlashAttention-3 replaces operators of torch, and Liger's rotary embedding those of all models of
    the family.
    """
    if policy.dtensor_cfg.use_liger_kernel:
        _check_device(f"{KEY}.use_liger_kernel: got true", device, "Try false")
        _liger(hf)
    if policy.dtensor_cfg.flash_attention == 3:
        _check_device(f"{KEY}.flash_attention: got 3", device, "Try 2")
        _flash_attention_3(device)


def _check_device(got: str, device: torch.device, instead: str) -> None:
    if device.type != "cuda":
        raise ValueError(f"{got} on {device.type}; expected a GPU. {instead}")


def _liger(hf: PreTrainedModel) -> None:
    """Replace norms, rotary embeddings and MLPs of the model. The head stays ours: it knows temperature and shards."""
    key = f"{KEY}.use_liger_kernel: got true"
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(f"{key}, but liger_kernel is not installed; expected it. Try pip install 'hetstep[liger]', or false")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply: Callable[..., None] | None = MODEL_TYPE_TO_APPLY_LIGER_FN.get(hf.config.model_type)
    if apply is None:
        raise ValueError(f"{key} for a model of type {hf.config.model_type}, which Liger does not know. Try false")
    apply(model=hf, cross_entropy=False, fused_linear_cross_entropy=False)


def _flash_attention_3(device: torch.device) -> None:
    key = f"{KEY}.flash_attention: got 3"
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise ValueError(f"{key}, but flash_attn_interface is not installed; expected FlashAttention-3's package. Try 2")
    major, minor = torch.cuda.get_device_capability(device)
    if major != HOPPER:  # as torch/nn/attention/_fa3.py requires
        raise ValueError(f"{key} on a GPU of compute capability {major}.{minor}; expected Hopper, {HOPPER}.0. Try 2")
    if current_flash_attention_impl() != "FA3":
        activate_flash_attention_impl("FA3")

"""Checks of transformers models before they train, and the buffers that no checkpoint holds."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from typing_extensions import override

from pipeline.models.family import unsupported_model
from pipeline.models.hugging_face import language_model
from pipeline.models.precision import served_dtype
from pipeline.train.logprobs import LINEAR, HeadFunction
from pipeline.train.sequence_resets import check_mixers
from pipeline.train.train_backend import ModelRole

# The configuration's keys of what heads compute: a soft cap, a factor, and a divisor of the logits.
_SOFT_CAPS = ("final_logit_softcapping", "final_logit_soft_cap", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier_scale")
_DIVISORS = ("logits_scaling",)


def check_model(hf: PreTrainedModel, role: ModelRole) -> HeadFunction:
    """Return the function that the model's head computes. Raises RecipeError if the backend does not support this model."""
    name = type(hf).__name__
    if not (hf._supports_attention_backend or hf._can_set_attn_implementation()):
        raise unsupported_model(f"{name} has custom attention, which packed attention cannot replace")
    if not hf._no_split_modules:
        raise unsupported_model(f"{name} does not declare its layers (_no_split_modules)")
    check_mixers(hf)
    head = "lm_head" if role.head == "logprobs" else "score"
    function = head_function(hf.config.get_text_config()) if head == "lm_head" else LINEAR
    try:
        supported = _head_is(function, hf, head)
    except Exception as error:
        raise unsupported_model(f"{name} has a head whose trial fails: {error}") from error
    if not supported:
        raise unsupported_model(f"{name} has a head that computes more than hidden @ W^T with a bias and {function}")
    return function


def head_function(config: PreTrainedConfig) -> HeadFunction:
    """Return the head's function according to the configuration, which `_head_is` verifies."""

    def of(names: Iterable[str]) -> float | None:
        return next((float(value) for name in names if (value := getattr(config, name, None))), None)

    return HeadFunction((of(_FACTORS) or 1.0) / (of(_DIVISORS) or 1.0), of(_SOFT_CAPS))


def _head_is(function: HeadFunction, hf: PreTrainedModel, name: str) -> bool:
    """Return whether the model's head computes this function. name: the attribute of the head, "lm_head" or "score".

    It runs the head on known hidden states, some of which are large enough to reveal a soft cap.
    """
    body, prefix = hf.base_model, hf.base_model_prefix
    head = hf.get_output_embeddings() if name == "lm_head" else hf.get_submodule("score")
    if type(head) is not nn.Linear or (head.bias is not None and name != "lm_head"):
        return False
    generator = torch.Generator().manual_seed(0)
    hidden = torch.tensor([1.0, 10.0, 100.0])[:, None] * torch.randn(1, 3, head.in_features, generator=generator)
    trial = nn.Linear(head.in_features, 8, bias=head.bias is not None)
    stub = _Body(body, hidden)
    set_head = hf.set_output_embeddings if name == "lm_head" else functools.partial(setattr, hf, name)
    try:
        setattr(hf, prefix, stub)
        set_head(trial)
        with torch.no_grad():
            # A classifier reads the last token that is not padding.
            token = int(hf.config.get_text_config().pad_token_id == 0)
            logits = hf(input_ids=torch.full((1, 3), token), use_cache=False).logits
            expected = function.apply_(trial(hidden))
            return torch.allclose(logits, expected if name == "lm_head" else expected[:, -1], rtol=1e-4, atol=1e-4)
    finally:
        setattr(hf, prefix, body)
        set_head(head)


class _Body(nn.Module):
    """Replaces a model's body: it returns known hidden states, and has the body's other attributes."""

    def __init__(self, body: nn.Module, hidden: torch.Tensor):
        super().__init__()
        self.__dict__["_body"] = body  # not a submodule
        self.__dict__["_hidden"] = hidden

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        # transformers annotates a FloatTensor and takes any.
        return _Output(last_hidden_state=self._hidden)


class _Output(MoeModelOutputWithPast):
    """An output in which every field that it does not have is None, as some models' heads need it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def freeze_buffers(hf: PreTrainedModel) -> None:
    """Turn the buffers of a checkpoint, such as the biases that balance experts, into parameters without gradients, in place.

    They are then read, cut, saved and sent like weights. Those that engines serve in float32 are in float32.
    """
    for name in sorted(set(hf.state_dict()) - {n for n, _ in hf.named_parameters(remove_duplicate=False)}):
        module, _, leaf = name.rpartition(".")
        owner = hf.get_submodule(module)
        buffer = owner._buffers.pop(leaf)
        assert buffer is not None  # it is in the state dict
        if not buffer.is_floating_point():
            raise unsupported_model(f"{type(hf).__name__} has the buffer {name} of {buffer.dtype} in its checkpoint")
        constant = torch.empty_like(buffer, dtype=served_dtype(name, buffer.dtype))
        owner.register_parameter(leaf, nn.Parameter(constant, requires_grad=False))


def derive_buffers(hf: PreTrainedModel, device: torch.device) -> None:
    """Compute the language model's buffers that are in no checkpoint (rotary frequencies), with its own initialisation."""
    for module_name, module in language_model(hf).named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        for name, buffer in buffers.items():
            if not buffer.is_floating_point():
                raise unsupported_model(f"buffer {module_name}.{name} of {type(hf).__name__} cannot be recomputed")
            setattr(module, name, torch.full_like(buffer, torch.nan, device=device))
        hf._init_weights(module)
        for name in buffers:
            if getattr(module, name).isnan().any():
                raise unsupported_model(f"buffer {module_name}.{name} of {type(hf).__name__} cannot be recomputed")

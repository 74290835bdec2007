"""Translate the model: its files, precision and adapters."""

from __future__ import annotations

import os
from typing import Any

from launch.recipes.translation.balancing_losses import ADAPTED, from_transformers
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator

DTENSOR = "policy.dtensor_cfg"
LORA = f"{DTENSOR}.lora_cfg"
QUANTIZED = "training of adapters on weights of 4 or 8 bits (QLoRA)"
SIXTEEN_BITS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
INIT = (
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "use_cache",
    "use_kernels",
    "revision",
    "device_map",
    "low_cpu_mem_usage",
)
RULES = (
    Only("model_revision", ("main", None), "a revision of a model", "model_name_or_path, the folder of its snapshot"),
    Only("load_in_4bit load_in_8bit", (False, None), QUANTIZED, "false"),
    Only("lora_modules_to_save", (None,), "whole layers that are trained beside adapters", "null"),
    Only("lora_target_parameters", (None,), "adapters of parameters that are not layers", "lora_target_modules"),
    Changed("trust_remote_code", (False, None), "code in the model's files is not run; the model must be in transformers"),
    Changed("activation_offloading", (False, None), "activations are recomputed, not offloaded"),
    Done("router_aux_loss_coef"),
    Ignored("attn_implementation tokenizer_name_or_path bnb_4bit_* use_bnb_nested_quant lora_* use_peft use_dora use_rslora"),
    Ignored("dtype bf16 fp16 gradient_checkpointing gradient_checkpointing_kwargs* use_liger_kernel use_liger_loss model_*"),
    Ignored("disable_dropout padding_free"),  # packed sequences have no padding; models of today have no dropout
)


def translate(t: Translator) -> None:
    """Translate the model's fields."""
    name = t.get("model_name_or_path")
    if isinstance(name, str):
        t.put("policy.model_name", os.path.expanduser(name) if name.startswith("~") else name, "model_name_or_path")
    _init(t)
    t.put("policy.precision", _precision(t), "bf16" if t.origins.get("bf16") else "dtype")
    t.put(f"{DTENSOR}.enabled", True, "model_name_or_path")
    t.put(f"{DTENSOR}.activation_checkpointing", t.on("gradient_checkpointing"), "gradient_checkpointing")
    t.put(f"{DTENSOR}.use_liger_kernel", t.on("use_liger_kernel"), "use_liger_kernel")
    for key in ("chat_template_path", "chat_template"):
        if (template := t.consume(key)) is not None:
            t.put("policy.tokenizer.chat_template", template, key)
    if t.on("use_peft"):
        _adapters(t)
    if t.has("router_aux_loss_coef"):  # not of a reward model
        from_transformers(t, "router_aux_loss_coef", ADAPTED if t.on("use_peft") else "")
    apply(t, RULES)


def _init(t: Translator) -> None:
    kwargs = t.consume("model_init_kwargs") or {}
    others = {key: value for key, value in kwargs.items() if key not in INIT} if isinstance(kwargs, dict) else kwargs
    if others:
        t.lacks(
            "model_init_kwargs", others, "arguments of transformers' from_pretrained", "policy.hf_config_overrides of Hetstep"
        )


def _precision(t: Translator) -> str:
    """Return the precision of the passes: that of mixed precision, else that in which the model is loaded."""
    held, half = t.get("dtype"), t.get("fp16") is True
    mixed = not half if t.get("bf16") is None else t.get("bf16") is True
    if held in SIXTEEN_BITS and t.origins.get("dtype"):
        t.change(f"dtype={held}", "weights of the optimizer are float32, which is more exact and needs more memory")
    if held not in (*SIXTEEN_BITS, "float32", "fp32", "auto", None):
        t.lacks("dtype", held, "this precision", "bfloat16")
    return "float16" if half else "bfloat16" if mixed else SIXTEEN_BITS.get(str(held), "float32")


def _adapters(t: Translator) -> None:
    t.put(f"{LORA}.enabled", True, "use_peft")
    t.put(f"{LORA}.dim", t.get("lora_r"), "lora_r")
    t.put(f"{LORA}.alpha", t.get("lora_alpha"), "lora_alpha")
    t.put(f"{LORA}.dropout", t.get("lora_dropout"), "lora_dropout")
    t.put(f"{LORA}.dropout_position", "pre", "lora_dropout")  # as in peft
    t.put(f"{LORA}.lora_A_init", "kaiming", "use_peft")  # as in peft
    for name in ("use_dora", "use_rslora"):
        t.put(f"{LORA}.{name}", t.on(name), name)
    targets: Any = t.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    every = targets == ["all-linear"]
    t.put(f"{LORA}.match_all_linear", every, "lora_target_modules")
    if every:
        return
    if not targets:
        targets = ["q_proj", "v_proj"]
        text = "peft's default for most models, q_proj and v_proj, is assumed; --lora_target_modules names others"
        t.change("lora_target_modules", text)
    t.put(f"{LORA}.target_modules", [str(target).rstrip(",") for target in targets], "lora_target_modules")

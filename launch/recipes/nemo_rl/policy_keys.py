"""Translate `policy` except `generation`: the model, its batches, and FSDP2's keys.

`megatron_keys.py` translates Megatron-Core's keys. Only one backend trains; the other one's section and optimizer have no
effect.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.recipes.nemo_rl import megatron_keys
from launch.recipes.nemo_rl.cluster_keys import environment_variables
from launch.recipes.nemo_rl.dataset_keys import find, report_missing
from launch.recipes.nemo_rl.logger_keys import PRETRAINED, TEXT
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, Same, Switch, apply, if_set, under
from launch.recipes.translation.translator import Translator, as_yaml
from pipeline.config import Backend
from pipeline.recipe import user_files

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # NeMo-RL's template null: the bare texts
BATCHING = ("dynamic_batching", "sequence_packing")
OF_BATCHING = ("enabled", "train_mb_tokens", "logprob_mb_tokens", "algorithm", "microbatch_order")
OF_BATCHING += ("sequence_length_round", "fuse_loss")
LORA_OPTION = "this option of LoRA"
FROZEN = "freezing the language model, which leaves nothing to train without images, sound or video"
FUSED_ADAM = (  # Transformer Engine's, by each of its names
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.FusedAdam",
)
OF_FUSED_ADAM = ("master_weights", "store_param_remainders", "master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
OF_FUSED_ADAM += ("use_decoupled_grad", "capturable", "set_grad_none")

MODEL = (
    Same("hf_config_overrides tokenizer.chat_template_kwargs logprob_chunk_size", if_set),
    Same("hf_config_overrides.* tokenizer.chat_template_kwargs.* tokenizer.name precision max_grad_norm"),
    Same("train_global_batch_size train_micro_batch_size logprob_batch_size max_total_sequence_length"),
    Switch("draft.*", "training of a draft model"),
    Same("router_replay.enabled", if_set),
    Only("quant_cfg", (None,), "quantization-aware training", "null, which trains in policy.precision"),
    Only("pretrained_checkpoint.*", (None,), PRETRAINED, "policy.model_name=FOLDER"),
    Ignored("dequantize_base_checkpoint", "a checkpoint in MXFP4 is read in bfloat16, and other quantized ones are refused"),
    Only("is_vlm", (False, None), "images, sound or video"),
    Ignored("quant_* disable_modelopt_layer_spec"),  # of quant_cfg
    Ignored("tokenizer.use_fastokens generation_batch_size activation_checkpointing_enabled"),
    Ignored("make_sequence_length_divisible_by"),  # no padding
    Changed("offload_optimizer_for_logprob", (False, None), "the optimizer's state stays on the GPUs, which needs more memory"),
    Done("model_name tokenizer.chat_template optimizer.* scheduler.* dtensor_cfg.enabled dtensor_cfg.env_vars.*"),
    Done("reward_model_cfg.enabled reward_model_cfg.reward_model_type"),
    Done(" ".join(f"{section}.{key}" for section in BATCHING for key in OF_BATCHING)),
    Ignored("refit_buffer_size_gb", "policy.generation.refit_cfg.bucket_bytes limits the staging of a refit"),
)
DTENSOR = under(
    "dtensor_cfg",
    (
        Same("tensor_parallel_size activation_checkpointing cpu_offload"),
        Same("automodel_kwargs.use_liger_kernel", if_set, ours="policy.dtensor_cfg.use_liger_kernel"),
        Same("context_parallel_size expert_parallel_size", lambda size: 1 if size is None else size),
        Same("dp_replicate_size", lambda size: size or 1, ours="policy.dtensor_cfg.data_parallel_replicate_size"),
        Only("custom_parallel_plan", (None,), "a custom tensor-parallel plan", "null, which uses the model's plan"),
        Done("sequence_parallel"),
        Ignored("automodel_kwargs.freeze_config.freeze_vision_tower automodel_kwargs.freeze_config.freeze_audio_tower", TEXT),
        Only(
            "automodel_kwargs.freeze_config.freeze_language_model",
            (False, None),
            FROZEN,
            "false, or policy.freeze_parameters in a recipe of Hetstep",
        ),
        Only(
            "automodel_kwargs.backend.fake_balanced_gate",
            (False, None),
            "routing that spreads tokens evenly over the experts",
            "false",
        ),
        Changed("automodel_kwargs.backend.gate_precision", (None,), "transformers selects the precision of the router"),
        Ignored(
            "automodel_kwargs.backend.* automodel_kwargs.use_sdpa_patching automodel_kwargs.attn_implementation"
            " automodel_kwargs.force_hf",
            "selects kernels; Hetstep trains the model of transformers",
        ),
        Ignored("_v2 automodel_kwargs clear_cache_every_n_steps defer_fsdp_grad_sync moe_parallelizer.*"),
    ),
)
LORA = under(
    "dtensor_cfg.lora_cfg",
    (
        Same("enabled target_modules exclude_modules match_all_linear dim alpha"),
        # NeMo-RL has two: xavier, and peft's uniform one for any other value.
        Same("lora_A_init", lambda start: start if start == "xavier" else "kaiming"),
        Same("dropout dropout_position", if_set),
        Ignored("use_triton"),
    ),
)


def translate(t: Translator, algorithm: str, path: Path) -> None:
    """Translate the section except `generation`. path: the recipe's file, for the files that it names."""
    backend = _backend(t)
    check_model_name(t, "policy.model_name")
    t.copy("policy.model_name")
    _chat_template(t, path)
    _batches(t)
    _reward_model(t, algorithm)
    for section in ("dtensor_cfg", "megatron_cfg"):
        t.put(f"policy.{section}.enabled", t.get(f"policy.{section}.enabled", False))
        t.consume(f"policy.{section}.enabled")
    if backend == "megatron":
        for unused in ("policy.dtensor_cfg", "policy.optimizer", "policy.scheduler"):
            t.consume(unused)
        megatron_keys.translate(t, algorithm)
    elif backend == "dtensor":
        t.consume("policy.megatron_cfg")
        _dtensor(t)
    apply(t, under("policy", MODEL))
    _yarn(t)


def _yarn(t: Translator) -> None:
    """Set max_position_embeddings to the context that YaRN gives, as vLLM expects; earlier versions computed it themselves."""
    key = "policy.hf_config_overrides"
    names = ("rope_type", "factor", "original_max_position_embeddings")
    kind, factor, original = (t.get(f"{key}.rope_scaling.{name}") for name in names)
    if kind == "yarn" and factor and original and not t.has(f"{key}.max_position_embeddings"):
        length = int(factor * original)
        t.put(f"{key}.max_position_embeddings", length, f"{key}.rope_scaling")
        t.change(f"{key}.rope_scaling", f"max_position_embeddings={length}, YaRN's factor times the original context")


def _backend(t: Translator) -> Backend | None:
    """Return the enabled backend. Return None, with a problem, if both or neither is enabled, which NeMo-RL refuses too."""
    backends: tuple[Backend, ...] = ("megatron", "dtensor")
    on: list[Backend] = [backend for backend in backends if t.on(f"policy.{backend}_cfg.enabled")]
    if len(on) == 1:
        return on[0]
    other = "is true too" if on else "is not true either"
    message = f"got {'true' if on else 'false'}, and policy.dtensor_cfg.enabled {other}; expected exactly one backend"
    t.problem("policy.megatron_cfg.enabled", "contradiction", message)
    for section in ("megatron_cfg", "dtensor_cfg", "optimizer", "scheduler"):
        t.consume(f"policy.{section}")
    return None


def check_model_name(t: Translator, key: str) -> None:
    """Add a problem if the value of a model's key is an instruction to the user instead of a name, as in some recipes."""
    name = t.get(key)
    if isinstance(name, str) and any(c.isspace() for c in name) and not Path(name).exists():
        message = f"got '{name}', an instruction; expected a model. Try {key}=FOLDER, or a name on the Hugging Face Hub"
        t.problem(key, "missing-value", message)


def _chat_template(t: Translator, path: Path) -> None:
    """Translate the chat template.

    NeMo-RL's values: absent or "default" for the tokenizer's template, null for texts without a template, a path of a *.jinja
    file, or else the template itself.
    """
    key = "policy.tokenizer.chat_template"
    template: Any = t.consume(key, "default")
    if template is None:
        t.put(key, PASSTHROUGH)
    elif template.endswith(".jinja"):
        if (file := find(template, path)) is None:
            report_missing(t, key, template, path)
        else:
            t.put(key, user_files.read_text(file))
    elif template.lower() != "default":
        t.put(key, template)


def _batches(t: Translator) -> None:
    """Translate sequence packing and dynamic batching. Both become sequence packing here."""
    packs, fills = (t.on(f"policy.{section}.enabled") for section in ("sequence_packing", "dynamic_batching"))
    section, ours = "policy.sequence_packing" if packs else "policy.dynamic_batching", "policy.sequence_packing"
    if packs or fills:
        train = f"{section}.train_mb_tokens"
        logprob = f"{section}.logprob_mb_tokens" if t.has(f"{section}.logprob_mb_tokens") else train
        t.put(f"{ours}.train_mb_tokens", t.get(train), train)
        t.put(f"{ours}.logprob_mb_tokens", t.get(logprob), logprob)
        if not packs:
            message = "the sequences of a microbatch are packed, not padded; policy.sequence_packing sets the number of tokens"
            t.change(f"{section}.enabled=true", message)
    t.put(f"{ours}.enabled", packs or fills, f"{section if packs or fills else ours}.enabled")
    if packs and fills:
        t.problem("policy.dynamic_batching.enabled", "contradiction", f"got true; expected false with {ours}.enabled=true")
    t.consume_off(*(f"policy.{batching}" for batching in BATCHING))


def _reward_model(t: Translator, algorithm: str) -> None:
    key = "policy.reward_model_cfg"
    enabled, kind = t.consume(f"{key}.enabled") is True, t.consume(f"{key}.reward_model_type")
    if algorithm == "rm" and not (enabled and kind == "bradley_terry"):
        message = "got other values; expected enabled=true and reward_model_type=bradley_terry, since rm trains a reward model"
        t.problem(key, "contradiction", message)
    if algorithm != "rm" and enabled:
        message = f"got true, but {algorithm} trains no reward model. Try false, or a recipe with a section rm"
        t.problem(f"{key}.enabled", "contradiction", message)


def _dtensor(t: Translator) -> None:
    name = t.get("policy.optimizer.name")
    if t.get("policy.optimizer") is None:
        message = "got null; FSDP2 needs an optimizer. Try {name: torch.optim.AdamW, kwargs: {lr: ...}}"
        t.problem("policy.optimizer", "missing-value", message)
    elif str(name).startswith("torch.optim."):
        t.copy("policy.optimizer")
    elif name in FUSED_ADAM:
        _fused_adam(t)
    else:
        t.lacks("policy.optimizer.name", name, "this optimizer", "torch.optim.AdamW")
    t.consume("policy.optimizer")
    t.copy("policy.scheduler")
    environment_variables(t, "policy.dtensor_cfg.env_vars", "cluster.train.env_vars")
    sequence = "policy.dtensor_cfg.sequence_parallel"
    if t.consume(sequence) and t.get("policy.dtensor_cfg.tensor_parallel_size", 1) > 1:  # no effect with one rank
        t.put(sequence, True)
    lora = "policy.dtensor_cfg.lora_cfg"
    t.consume_off(lora)
    if t.on(f"{lora}.enabled"):
        t.put_defaults({f"{lora}.lora_A_init": "xavier"}, lora)
    apply(t, under("policy", (*LORA, *DTENSOR)))
    if t.on(f"{lora}.enabled") and t.get(f"{lora}.exclude_modules") and not t.get(f"{lora}.target_modules"):
        t.put(f"{lora}.match_all_linear", True, f"{lora}.exclude_modules")  # theirs adapts all other linear layers then


def _fused_adam(t: Translator) -> None:
    """Translate Transformer Engine's Adam, with its defaults, into torch's Adam or AdamW."""
    key = "policy.optimizer.kwargs"
    kwargs = dict(t.get(key) or {})
    values = {name: kwargs.pop(name, None) for name in OF_FUSED_ADAM}
    name = "AdamW" if kwargs.pop("adam_w_mode", True) else "Adam"
    if kwargs.pop("bias_correction", True) is False:
        t.lacks(f"{key}.bias_correction", False, "this optimizer", "true")
    t.put("policy.optimizer.name", f"torch.optim.{name}", "policy.optimizer.name")
    t.put(key, {"weight_decay": 0.0, **kwargs})
    if texts := [f"{name}={as_yaml(value)}" for name, value in values.items() if value is not None]:
        text = "master weights and optimizer state are float32, which is more exact and needs more memory"
        t.change(f"{key}: {', '.join(texts)}", text)

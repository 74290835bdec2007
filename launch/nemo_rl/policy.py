"""`policy` but for generation: the model, its batches, and FSDP2's keys. Megatron-Core's are in `megatron.py`.

Where only one backend trains, the other's section says nothing, and neither does its optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.nemo_rl import megatron
from launch.nemo_rl.cluster import environment_variables
from launch.nemo_rl.features import Feature
from launch.nemo_rl.files import find, missing
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Changed, Only, Switch, apply, ignored, same, under
from pipeline.config.layout import Backend

PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # their template null: the bare texts

MODEL = (
    same(
        "tokenizer.name",
        "tokenizer.chat_template_kwargs.*",
        "hf_config_overrides.*",
        "train_global_batch_size",
        "train_micro_batch_size",
        "logprob_batch_size",
        "max_total_sequence_length",
        "precision",
        "max_grad_norm",
    ),
    Switch("draft", Feature.DRAFT),
    Switch("router_replay", Feature.ROUTER_REPLAY),
    Only(("quant_cfg",), (None,), Feature.QUANTIZATION, "null trains in policy.precision"),
    Only(("pretrained_checkpoint.*",), (None,), Feature.PRETRAINED, "policy.model_name may be a folder"),
    Only(("dequantize_base_checkpoint",), (False, None), Feature.DEQUANTIZE, "a checkpoint in bfloat16"),
    Only(("is_vlm",), (False, None), Feature.MULTIMODAL),
    ignored("quant_*", "disable_modelopt_layer_spec"),  # of quant_cfg
    ignored("tokenizer.use_fastokens", "generation_batch_size", "activation_checkpointing_enabled"),
    ignored("make_sequence_length_divisible_by"),  # nothing is padded
    Changed(("offload_optimizer_for_logprob",), (False, None), "the optimizer's state stays on the GPUs: more memory"),
    ignored("refit_buffer_size_gb", why="policy.generation.refit_cfg.bucket_bytes bounds what a refit stages"),
)

KERNELS = "which kernels compute; the model is transformers' own"
DTENSOR = under(
    "dtensor_cfg",
    (
        same("tensor_parallel_size", "activation_checkpointing", "cpu_offload"),
        Only(("context_parallel_size",), (1, None), Feature.DTENSOR_CONTEXT, "Megatron-Core has it: policy.megatron_cfg"),
        Only(("expert_parallel_size",), (1, None), Feature.DTENSOR_EXPERTS, "Megatron-Core has it: policy.megatron_cfg"),
        Changed(
            ("dp_replicate_size",), (1, None), "weights and state are cut over all ranks, not over a replica's: less memory"
        ),
        Only(("custom_parallel_plan",), (None,), Feature.CUSTOM_PLAN, "null takes the model's"),
        Changed(("sequence_parallel",), (False, None), "activations between layers are whole on each tensor-parallel rank"),
        Only(("automodel_kwargs.freeze_config.*",), (False, None), Feature.FREEZING, "all weights are trained"),
        Only(("automodel_kwargs.backend.fake_balanced_gate",), (False, None), Feature.BALANCING, "false"),
        Changed(("automodel_kwargs.backend.gate_precision",), (None,), "transformers' router has its own precision"),
        ignored(
            "automodel_kwargs.backend.*",
            "automodel_kwargs.use_sdpa_patching",
            "automodel_kwargs.attn_implementation",
            "automodel_kwargs.force_hf",
            why=KERNELS,
        ),
        ignored("_v2", "automodel_kwargs", "clear_cache_every_n_steps", "defer_fsdp_grad_sync", "moe_parallelizer.*"),
    ),
)

LORA = under(
    "dtensor_cfg.lora_cfg",
    (
        same("enabled", "target_modules", "exclude_modules", "match_all_linear", "dim", "alpha"),
        Only(("dropout",), (0, 0.0, None), Feature.LORA_OPTION, "0"),
        ignored("dropout_position", "use_triton"),
    ),
)

BATCHING = (
    "enabled",
    "train_mb_tokens",
    "logprob_mb_tokens",
    "algorithm",
    "microbatch_order",
    "sequence_length_round",
    "fuse_loss",
)

TAKEN = (  # by the functions below, and by the sections that know them
    "model_name",
    "tokenizer.chat_template",
    "logprob_chunk_size",
    "optimizer.*",
    "scheduler.*",
    *(f"{section}.{key}" for section in ("dynamic_batching", "sequence_packing") for key in BATCHING),
    "reward_model_cfg.enabled",
    "reward_model_cfg.reward_model_type",
    "dtensor_cfg.enabled",
    "dtensor_cfg.env_vars.*",
    "dtensor_cfg.lora_cfg.*",
)


def translate(ledger: Ledger, algorithm: str, path: Path) -> None:
    backend = trains(ledger)
    check_model_name(ledger, "policy.model_name")
    ledger.copy("policy.model_name")
    _chat_template(ledger, path)
    if (chunk := ledger.take("policy.logprob_chunk_size")) is not None:  # null there: no bound; ours costs nothing
        ledger.put("policy.logprob_chunk_size", chunk, "policy.logprob_chunk_size")
    _batches(ledger)
    _reward_model(ledger, algorithm)
    for section in ("dtensor_cfg", "megatron_cfg"):
        if ledger.has(f"policy.{section}.enabled"):
            ledger.copy(f"policy.{section}.enabled")
        else:
            ledger.layer.setdefault("policy", {}).setdefault(section, {})["enabled"] = False
    for nothing in ("hf_config_overrides", "tokenizer.chat_template_kwargs"):
        if ledger.get(f"policy.{nothing}") is None:
            ledger.take(f"policy.{nothing}")
    if backend == "megatron":
        for unused in ("policy.dtensor_cfg", "policy.optimizer", "policy.scheduler"):
            ledger.take(unused)
        megatron.translate(ledger, algorithm)
    elif backend == "dtensor":
        ledger.take("policy.megatron_cfg")
        _dtensor(ledger)
    apply(ledger, under("policy", MODEL))


def trains(ledger: Ledger) -> Backend | None:
    """Which backend trains. One must; both, or neither, is a problem there too."""
    on = {backend: ledger.get(f"policy.{backend}_cfg.enabled") is True for backend in ("megatron", "dtensor")}
    if sum(on.values()) == 1:
        return "megatron" if on["megatron"] else "dtensor"
    which = "both true" if all(on.values()) else "neither true"
    ledger.problem(
        "policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled", f"{which}; exactly one of the backends must be enabled"
    )
    ledger.take("policy.megatron_cfg")
    ledger.take("policy.dtensor_cfg")
    ledger.take("policy.optimizer")
    ledger.take("policy.scheduler")
    return None


def check_model_name(ledger: Ledger, key: str) -> None:
    """Some recipes have an instruction in its place."""
    name = ledger.get(key)
    if isinstance(name, str) and any(c.isspace() for c in name) and not Path(name).exists():
        ledger.problem(key, f"'{name}' is an instruction, not a model; {key}=FOLDER, or a name on the Hugging Face Hub")


def _chat_template(ledger: Ledger, path: Path) -> None:
    """Absent and "default" are the tokenizer's own, null the bare texts, *.jinja a file, anything else the template."""
    key = "policy.tokenizer.chat_template"
    if not ledger.has(key):
        return
    template: Any = ledger.take(key)
    if template is None:
        template = PASSTHROUGH
    elif template.lower() == "default":
        return
    elif template.endswith(".jinja"):
        file = find(template, path)
        if file is None:
            ledger.problem(key, missing(template, path))
            return
        template = file.read_text()
    ledger.put(key, template, key)


def _batches(ledger: Ledger) -> None:
    """Ours are laid end to end in any case; the keys say how many make a microbatch."""
    packs, fills = (ledger.get(f"policy.{s}.enabled") is True for s in ("sequence_packing", "dynamic_batching"))
    section = "policy.sequence_packing" if packs else "policy.dynamic_batching"
    if packs or fills:
        train = f"{section}.train_mb_tokens"
        logprob = f"{section}.logprob_mb_tokens" if ledger.has(f"{section}.logprob_mb_tokens") else train
        ledger.put("policy.sequence_packing.enabled", True, f"{section}.enabled")
        ledger.put("policy.sequence_packing.train_mb_tokens", ledger.get(train), train)
        ledger.put("policy.sequence_packing.logprob_mb_tokens", ledger.get(logprob), logprob)
        if not packs:
            ledger.change(
                f"{section}.enabled=true",
                "the sequences of a microbatch are laid end to end, not padded; its tokens are policy.sequence_packing's",
            )
    else:
        ledger.put("policy.sequence_packing.enabled", False, "policy.sequence_packing.enabled")
    if packs and fills:
        ledger.problem("policy.dynamic_batching.enabled", "true, and policy.sequence_packing.enabled too; one of the two")
    for batching in ("policy.sequence_packing", "policy.dynamic_batching"):
        ledger.take_off(batching, *BATCHING)


def _reward_model(ledger: Ledger, algorithm: str) -> None:
    key = "policy.reward_model_cfg"
    enabled, kind = ledger.take(f"{key}.enabled") is True, ledger.take(f"{key}.reward_model_type")
    if algorithm == "rm" and not (enabled and kind == "bradley_terry"):
        ledger.problem(key, "algorithm rm trains a reward model; enabled true and reward_model_type bradley_terry")
    if algorithm != "rm" and enabled:
        ledger.problem(f"{key}.enabled", f"true, but {algorithm} trains no reward model; false, or a recipe with a section rm")


def _dtensor(ledger: Ledger) -> None:
    section = "policy.dtensor_cfg"
    if ledger.get("policy.optimizer") is None:
        ledger.take("policy.optimizer")
        ledger.problem("policy.optimizer", "FSDP2 trains, and there is none; {name: torch.optim.AdamW, kwargs: {lr: ...}}")
    else:
        name = ledger.get("policy.optimizer.name")
        if not str(name).startswith("torch.optim."):
            ledger.lacks("policy.optimizer.name", name, Feature.OPTIMIZER, "torch.optim.AdamW")
            ledger.take("policy.optimizer")
        else:
            ledger.copy("policy.optimizer")
    ledger.copy("policy.scheduler")
    ledger.put("checkpointing.async_save", False, f"{section}.enabled")
    environment_variables(ledger, f"{section}.env_vars", "cluster.train.env_vars")
    _lora(ledger)
    if (liger := ledger.take(f"{section}.automodel_kwargs.use_liger_kernel")) is not None:
        ledger.put(f"{section}.use_liger_kernel", liger, f"{section}.automodel_kwargs.use_liger_kernel")
    apply(ledger, under("policy", DTENSOR))


def _lora(ledger: Ledger) -> None:
    key = "policy.dtensor_cfg.lora_cfg"
    if ledger.get(f"{key}.enabled") is not True:
        ledger.take(key)
        return
    for names in ("target_modules", "exclude_modules"):
        if wild := [name for name in ledger.get(f"{key}.{names}") or () if "*" in name]:
            ledger.lacks(f"{key}.{names}", wild, Feature.LORA_OPTION, "names of layers, or their endings, without *")
            ledger.take(f"{key}.{names}")
    start = ledger.take(f"{key}.lora_A_init", "xavier")  # theirs are two: xavier, and peft's uniform one for any other word
    ledger.put(f"{key}.lora_A_init", start if start == "xavier" else "kaiming", f"{key}.lora_A_init")
    apply(ledger, under("policy", LORA))

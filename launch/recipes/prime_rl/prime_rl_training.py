"""Translate the model, optimizers and schedules, the run's length, checkpoints, trackers and GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from launch.recipes.prime_rl.prime_rl_defaults import DEPLOYMENT, LORA, OPTIMIZERS, SCHEDULERS
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, Rule, apply, under
from launch.recipes.translation.translator import Translator
from pipeline.algorithms.sections import UNBOUNDED

DTENSOR = "policy.dtensor_cfg"
VLLM = "policy.generation.vllm_cfg"
LR = "torch.optim.lr_scheduler"
MODEL_KEYS = (
    "name seq_len fsdp_cpu_offload dp_replicate ep cp cp_style optimization_dtype freeze_moe_router quantization lora ac"
    " full_offload optim_cpu_offload trust_remote_code"
)
OFFLOADED = "the optimizer's state stays on the GPUs, which needs more memory; policy.dtensor_cfg.cpu_offload=true offloads it"
MODEL: tuple[Rule, ...] = (
    Done("name seq_len dp_replicate ep cp optimization_dtype lora ac ac.mode ac.freq fsdp_cpu_offload full_offload"),
    Only("quantization", (None,), "training in 8 bits", "null"),
    Only("quantization.*", (), "training in 8 bits", "null"),
    Only("freeze_moe_router", (False, None), "routers that are not trained by prime-rl's keys", "policy.freeze_parameters"),
    Only("debug.num_layers", (None,), "a model without some of its layers", "policy.hf_config_overrides"),
    Only("debug.force_balanced_routing", (False, None), "routing that is balanced by force", "false"),
    Only("vlm", (None,), "images", "null"),
    Only("index_cache index_cache.*", (None,), "reuse of a sparse attention's choice", "null"),
    Done("debug.random_init"),
    Changed(
        "cp_style", ("ring", None), "ranks share a sequence by context parallelism, in place of Ulysses, with equal results"
    ),
    Changed("trust_remote_code", (False, None), "code in the model's files is not run; the model must be in transformers"),
    Changed("ep_comm_backend", ("torch", None), "NCCL's all-to-all sends tokens to their experts, slower than DeepEP"),
    Changed("reduce_dtype", ("float32", None), "gradients are reduced in float32"),
    Changed("moe_router_dtype", ("float32", None), "routers are computed as transformers does"),
    Ignored("optim_cpu_offload full_offload.* ac.targets ac_offloading ac_offloading.* deepep_* moe_use_grouped_mm"),
    Ignored("moe_fused_kernel attn compile compile.* impl reshard_after_forward conversion_dir fused_lm_head_*"),
)
RULES: tuple[Rule, ...] = (
    *under("trainer.model", MODEL),
    Done("trainer.optim.type trainer.optim.lr trainer.optim.weight_decay trainer.optim.max_norm trainer.optim.betas1"),
    Done("trainer.optim.betas2 trainer.optim.mu trainer.optim.nesterov trainer.optim.momentum trainer.max_steps"),
    Done("trainer.scheduler.type trainer.scheduler.warmup_steps trainer.scheduler.decay_steps trainer.scheduler.min_lr"),
    Done("trainer.ckpt trainer.ckpt.interval trainer.ckpt.keep_last trainer.tokenizer.name trainer.tokenizer.chat_template"),
    Done("deployment.type deployment.gpus_per_node deployment.num_train_gpus deployment.num_infer_gpus run.name"),
    Done("deployment.num_train_nodes deployment.num_infer_nodes deployment.num_infer_replicas trainer.monitors.wandb.*"),
    Done("slurm.partition slurm.account slurm.time slurm.nodelist slurm.exclude slurm.job_name trainer.monitors.wandb"),
    Only("trainer.data.fake", (None,), "fake data", "null"),
    Only("trainer.data.fake.*", (), "fake data", "no section trainer.data.fake"),
    Only("resume.dir trainer.resume.dir", (None,), "a start from a checkpoint of prime-rl", "null"),
    Changed("deployment.nodes_per_fsdp_group", (None,), "policy.dtensor_cfg.data_parallel_replicate_size sets replicas"),
    Changed("slurm.pre_run_command slurm.template_path", (None,), "a job's script is Hetstep's"),
    Changed("trainer.ckpt.keep_interval ckpt.keep_interval", (None,), "checkpointing.keep_top_k decides which are kept"),
    Ignored("trainer.output_dir output_dir clean run.* ckpt.output_dir trainer.ckpt.output_dir", "run_dir has a run's files"),
    Ignored("model.name model.trust_remote_code max_steps seq_len ckpt ckpt.* tokenizer.* trainer.tokenizer.*"),
    Ignored("trainer.ckpt.* resume resume.* trainer.resume* log.* trainer.log.* monitors monitors.* trainer.monitors.*"),
    Ignored("weight_broadcast.* trainer.weight_broadcast.* rollout_transport.* trainer.rollout_transport.* dry_run"),
    Ignored("trainer.matmul_precision trainer.memory_profiler_path trainer.gc trainer.gc.* trainer.trace_path"),
    Ignored("trainer.dist_timeout_seconds trainer.heartbeat* trainer.metrics_server* trainer.enable_token_export"),
    Ignored("deployment.orchestrator_on_inference slurm.cleanup_grace_period slurm.shared_fs slurm.project_dir slurm"),
    Ignored("trainer.data trainer inference inference.vllm inference.log.* inference.weight_broadcast.* inference.output_dir"),
    Ignored("inference.router inference.router.* inference.server.* inference.slurm.* inference.deployment.*"),
    Done("env_vars.* trainer.env_vars.* inference.env_vars.*"),
    Ignored("inference.use_* inference.dry_run inference.deploy* inference.kv_cache_offload* inference.experimental.*"),
)


def values_of(t: Translator, key: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section, with the defaults of its type, and consume those, so that unknown keys remain."""
    t.consume(f"{key}.type")
    return {name: t.consume(f"{key}.{name}", default) for name, default in defaults.items()}


# ---- the model -------------------------------------------------------------------------------------------------------------


def model(t: Translator, section: str) -> None:
    """Translate the model and its layout. section: of the trainer."""
    t.put("policy.model_name", t.get(f"{section}.name"), f"{section}.name")
    t.put("policy.precision", "bfloat16", f"{section}.optimization_dtype")
    if t.get(f"{section}.optimization_dtype") != "float32":
        t.change(f"{section}.optimization_dtype", "weights of the optimizer are float32, which needs more memory")
    if t.get(f"{section}.debug.random_init") is True:
        t.put("policy.random_init", True, f"{section}.debug.random_init")
    t.put(f"{DTENSOR}.enabled", True, f"{section}.name")
    for ours, theirs in (("data_parallel_replicate_size", "dp_replicate"), ("context_parallel_size", "cp")):
        t.put(f"{DTENSOR}.{ours}", t.get(f"{section}.{theirs}"), f"{section}.{theirs}")
    if isinstance(experts := t.get(f"{section}.ep"), int):
        t.put(f"{DTENSOR}.expert_parallel_size", experts, f"{section}.ep")
    if section.startswith("trainer") and isinstance(row := t.get(f"{section}.seq_len"), int):
        for passes in ("train", "logprob"):
            t.put(f"policy.sequence_packing.{passes}_mb_tokens", row, f"{section}.seq_len")
    t.put(f"{DTENSOR}.cpu_offload", t.get(f"{section}.fsdp_cpu_offload") is True, f"{section}.fsdp_cpu_offload")
    if t.get(f"{section}.full_offload"):
        t.change(f"{section}.full_offload", OFFLOADED)
    _recomputation(t, f"{section}.ac")
    _adapters(t, f"{section}.lora")
    tokenizer = section.removesuffix("model") + "tokenizer"
    for ours, theirs in (("name", "name"), ("chat_template", "chat_template")):
        if (value := t.get(f"{tokenizer}.{theirs}")) is not None:
            t.put(f"policy.tokenizer.{ours}", value, f"{tokenizer}.{theirs}")
    apply(t, under(section, MODEL))


def _recomputation(t: Translator, key: str) -> None:
    on = not (t.has(key) and t.get(key) is None)
    t.put(f"{DTENSOR}.activation_checkpointing", on, key)
    given = t.get(key) or {}
    if on and given.get("mode") == "selective":
        t.put(f"{DTENSOR}.recompute_granularity", "selective", f"{key}.mode")
    if on and given.get("freq", 1) != 1:
        t.change(f"{key}.freq={given['freq']}", "every layer is recomputed")


def _adapters(t: Translator, key: str) -> None:
    given = t.get(key)
    if given is None:
        return
    values = values_of(t, key, LORA)
    ours = f"{DTENSOR}.lora_cfg"
    t.put(f"{ours}.enabled", True, key)
    t.put(f"{ours}.dim", values["rank"], f"{key}.rank")
    t.put(f"{ours}.alpha", int(values["alpha"]), f"{key}.alpha")
    t.put(f"{ours}.dropout", values["dropout"], f"{key}.dropout")
    t.put(f"{ours}.dropout_position", "pre", f"{key}.dropout")
    t.put(f"{ours}.lora_A_init", "kaiming", key)
    t.put(f"{ours}.match_all_linear", False, f"{key}.target_modules")
    modules = [name for name in values["target_modules"] if name != "experts"]
    modules += ["experts.*"] if "experts" in values["target_modules"] and given.get("target_modules") else []
    if not given.get("target_modules"):  # prime-rl's own names cover several families
        t.put(f"{ours}.match_all_linear", True, key)
        t.change(f"{key}.target_modules", "all linear layers but the head, and all experts, get adapters")
    else:
        t.put(f"{ours}.target_modules", modules, f"{key}.target_modules")
    if values["modules_to_save"]:
        t.lacks(f"{key}.modules_to_save", values["modules_to_save"], "whole layers that are trained beside adapters", "[]")


# ---- optimizers and schedules ----------------------------------------------------------------------------------------------


def optimizer(t: Translator, section: str, steps: int | None) -> None:
    """Translate the optimizer and its schedule. section: `trainer.`, or empty. steps: of the run."""
    key = f"{section}optim"
    kind = str(t.get(f"{key}.type"))
    if kind not in ("adamw", "muon", "sgd"):
        t.lacks(f"{key}.type", kind, "this optimizer by prime-rl's keys", "adamw, muon or sgd")
        t.consume(key)
        return
    given = values_of(t, key, OPTIMIZERS[kind])
    kwargs: dict[str, Any] = {"lr": given["lr"], "weight_decay": given["weight_decay"]}
    name = {"adamw": "AdamW", "muon": "Muon", "sgd": "SGD"}[kind]
    if kind == "adamw":
        kwargs |= {"betas": [given["betas1"], given["betas2"]], "eps": 1e-8}
    elif kind == "sgd":
        kwargs |= {"momentum": given["momentum"], "nesterov": given["nesterov"]}
    else:
        kwargs |= {"momentum": given["mu"], "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
        kwargs["adamw"] = {"betas": [given["betas1"], given["betas2"]]}
    t.put("policy.optimizer.name", f"torch.optim.{name}", f"{key}.type")
    t.put("policy.optimizer.kwargs", kwargs, key)
    for ours in ("lr", "weight_decay"):
        if origin := t.origins.get(f"{key}.{ours}"):
            t.our_origins[f"policy.optimizer.kwargs.{ours}"] = f"{origin} ({key}.{ours})"
    full = t.get(f"{section}model.full_offload") or t.get(f"{section}model.ep_comm_backend") == "deepep"
    t.put("policy.max_grad_norm", None if full else given["max_norm"], f"{key}.max_norm")
    _schedule(t, f"{section}scheduler", given["lr"], steps)


def _schedule(t: Translator, key: str, rate: float, steps: int | None) -> None:
    kind = str(t.get(f"{key}.type"))
    if kind not in SCHEDULERS:
        t.lacks(f"{key}.type", kind, "this schedule", f"one of: {', '.join(SCHEDULERS)}")
        return
    given = values_of(t, key, SCHEDULERS[kind])
    warm_up, decay = given.get("warmup_steps", 0), given.get("decay_steps", 0)
    if kind == "constant":
        t.put("policy.scheduler", None, f"{key}.type")
        return
    if steps is None and (kind == "cosine" or decay):
        t.problem(
            f"{key}.type", "missing-value", f"got {kind} without max_steps; expected a number of steps. Try max_steps=STEPS"
        )
        return
    least = given["min_lr"] / rate if given["min_lr"] > 0 else 1e-8
    parts: list[dict[str, Any]] = []
    starts: list[int] = []
    if warm_up:
        parts.append({"name": f"{LR}.LinearLR", "kwargs": {"start_factor": least, "end_factor": 1.0, "total_iters": warm_up}})
        starts.append(warm_up)
    if kind == "cosine":
        parts.append(
            {"name": f"{LR}.CosineAnnealingLR", "kwargs": {"T_max": (steps or 1) - warm_up, "eta_min": given["min_lr"]}}
        )
    elif decay:
        parts.append({"name": f"{LR}.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}})
        end = {"start_factor": 1.0, "end_factor": least, "total_iters": max(1, decay - 1)}
        parts.append({"name": f"{LR}.LinearLR", "kwargs": end})
        starts.append((steps or decay) - decay)
    elif warm_up:
        starts = []
    t.put("policy.scheduler", parts[0] if len(parts) == 1 else [*parts, {"milestones": starts}], f"{key}.type")


# ---- the run ---------------------------------------------------------------------------------------------------------------


def length(t: Translator, algorithm: str, section: str) -> int | None:
    """Translate the number of steps, which may be none, and return it. section: `trainer.`, or empty."""
    steps = t.get(f"{section}max_steps")
    t.put(f"{algorithm}.max_num_steps", UNBOUNDED if steps is None else steps, f"{section}max_steps")
    t.put(f"{algorithm}.max_num_epochs", UNBOUNDED, f"{section}max_steps")
    return steps


def shared(t: Translator, section: str) -> None:
    """Translate checkpoints, trackers, the run's name and Slurm. section: `trainer.`, or empty."""
    key = f"{section}ckpt"
    given = t.get(key)
    t.put("checkpointing.enabled", given is not None, key)
    if given is None:
        t.change(key, "no section ckpt: the run saves no checkpoint, and cannot be continued or exported")
    else:
        t.put("checkpointing.save_period", given.get("interval") or UNBOUNDED, f"{key}.interval")
        t.put("checkpointing.keep_top_k", given.get("keep_last"), f"{key}.keep_last")
    wandb = t.get(f"{section}monitors.wandb")
    if wandb is not None:
        t.put("logger.wandb_enabled", True, f"{section}monitors.wandb")
        t.put("logger.wandb.project", wandb.get("project", "prime-rl"), f"{section}monitors.wandb.project")
        if wandb.get("name"):
            t.put("logger.wandb.name", wandb["name"], f"{section}monitors.wandb.name")
    if (name := t.get("run.name")) is not None:
        t.put("name", name, "run.name")
    for variables, components in (
        ("env_vars", ("train", "generate")),
        ("trainer.env_vars", ("train",)),
        ("inference.env_vars", ("generate",)),
    ):
        for name, value in (t.get(variables) or {}).items():
            for component in components:
                t.put(f"cluster.{component}.env_vars.{name}", str(value), f"{variables}.{name}")
    _slurm(t)


def _slurm(t: Translator) -> None:
    given = t.get("slurm") or {}
    for name in ("partition", "account"):
        if given.get(name) is not None:
            for component in ("train", "generate"):
                t.put(f"cluster.{component}.{name}", given[name], f"slurm.{name}")
    options = {name: given[name] for name in ("nodelist", "exclude") if given.get(name) is not None}
    if options:
        t.put("cluster.sbatch_options", options, "slurm")
    if isinstance(limit := given.get("time"), str):
        days, _, clock = limit.rpartition("-")
        parts = [int(part) for part in clock.split(":")] + [0, 0]
        t.put("cluster.time_min", int(days or 0) * 1440 + parts[0] * 60 + parts[1], "slurm.time")


def engines(t: Translator, ours: Set[str]) -> None:
    """Translate the GPUs of trainer and engines, and vLLM's arguments. ours: our keys on the command line."""
    given = {**DEPLOYMENT, **(t.get("deployment") or {})}
    if given["type"] == "single_node":
        t.put("cluster.share_nodes", True, "deployment.type")
        t.put("cluster.train.gpus_per_node", given["num_train_gpus"], "deployment.num_train_gpus")
        t.put("cluster.generate.gpus_per_node", given["num_infer_gpus"], "deployment.num_infer_gpus")
    else:
        nodes = (given.get("num_infer_nodes") or 1) * given.get("num_infer_replicas", 1)
        for component, number, key in (("train", given.get("num_train_nodes"), "train"), ("generate", nodes, "infer")):
            t.put(f"cluster.{component}.nodes", number, f"deployment.num_{key}_nodes")
            t.put(f"cluster.{component}.gpus_per_node", given["gpus_per_node"], "deployment.gpus_per_node")
    t.put("policy.generation.colocated.enabled", False, "deployment.type")
    t.consume("deployment")
    key = "inference.vllm"
    vllm: dict[str, Any] = dict(t.consume(key) or {})
    for name in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager"):
        t.put(f"{VLLM}.{name}", vllm.pop(name), f"{key}.{name}")
    if (prefixes := vllm.pop("enable_prefix_caching", None)) is not None:
        t.put(f"{VLLM}.enable_prefix_caching", prefixes, f"{key}.enable_prefix_caching")
    if (quantization := vllm.pop("quantization", None)) == "fp8":
        t.put(f"{VLLM}.precision", "fp8", f"{key}.quantization")
    elif quantization is not None:
        t.lacks(f"{key}.quantization", quantization, "this precision of engines", "null or fp8")
    if vllm.pop("enable_expert_parallel", False):
        size = t.get_layer(f"{VLLM}.tensor_parallel_size")
        t.put(f"{VLLM}.expert_parallel_size", size, f"{key}.enable_expert_parallel")
    vllm.pop("enable_return_routed_experts", None)  # trainer.enable_router_replay decides
    for name in list(vllm):
        if name in UNREAD_BY_ENGINES.split() or name.startswith("data_parallel"):
            vllm.pop(name)
    for name, value in vllm.items():
        t.put(f"policy.generation.vllm_kwargs.{name}", value, f"{key}.{name}")


UNREAD_BY_ENGINES = (
    "model dtype max_model_len trust_remote_code chat_template tool_call_parser reasoning_parser api_server_count seed"
    " enable_lora max_loras max_cpu_loras max_lora_rank lora_target_modules all2all_backend enable_eplb enable_dbo"
)
"""vLLM's arguments that follow from other keys, or belong to its server."""


def ignore(t: Translator) -> None:
    """Ignore the keys of prime-rl's infrastructure."""
    apply(t, RULES)

"""Translate sizes of batches, the length of the run, validation, checkpoints and trackers.

TRL counts optimizer updates; a step here may have several updates (`RunLength.updates`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from launch.recipes.translation import record_counts
from launch.recipes.translation.rules import Changed, Ignored, Only, apply
from launch.recipes.translation.tracker_keys import put_trackers
from launch.recipes.translation.translator import Translator
from pipeline.algorithms.sections import UNBOUNDED

"""TRL's trackers that are ours too."""
SHARDING = "FSDP2 shards weights, gradients and the optimizer's state, whatever library does so for TRL"
RULES = (
    Only("auto_find_batch_size", (False, None), "batch sizes that are searched", "false"),
    Only("resume_from_checkpoint", (None, False, True), "a start from a checkpoint of TRL", "null"),
    Only("label_smoothing_factor", (0, 0.0, None), "label smoothing", "0"),
    Only("parallelism_config", (None,), "parallel sizes by TRL's fields", "policy.dtensor_cfg.context_parallel_size"),
    Changed("full_determinism", (False, None), "policy.deterministic=true gives the same bits in each run"),
    Changed("data_seed", (None,), "the run's seed determines the order of the data"),
    Changed(
        "load_best_model_at_end metric_for_best_model greater_is_better", (False, None), "checkpointing.metric_name does this"
    ),
    Ignored("fsdp fsdp.* fsdp_config fsdp_config.* deepspeed deepspeed.* accelerator_config* ddp_*", SHARDING),
    Changed("push_to_hub push_to_hub_revision", (False, None), "a run uploads nothing"),
    Ignored("hub_* overwrite_hub_revision"),
    Ignored("do_train do_eval do_predict do_sample debug local_rank log_level* log_on_each_node logging_* disable_tqdm"),
    Ignored("dataloader_* remove_unused_columns skip_memory_metrics torch_empty_cache_steps include_* ignore_data_skip"),
    Ignored("torch_compile* tf32 bf16_full_eval fp16_full_eval use_cpu use_mps_device average_tokens_across_devices"),
    Ignored("per_device_eval_batch_size eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object"),
    Ignored("batch_eval_metrics prediction_loss_only save_only_model save_on_each_node save_safetensors overwrite_output_dir"),
    Ignored("enable_jit_checkpoint restore_callback_states_from_checkpoint group_by_length length_column_name label_names"),
    Ignored("train_sampling_strategy optim_target_modules liger_kernel_config use_cache project trackio_* run_name"),
    Ignored("lora_task_type ignore_bias_buffers dataset_streaming streaming", ""),
    Ignored("callbacks benchmarks system_prompt_* wandb_* log_evals_* pad_to_multiple_of", ""),
    Ignored("eval_on_start eval_strategy eval_steps save_strategy save_steps save_total_limit report_to"),
)


@dataclass(frozen=True)
class RunLength:
    """Batches and length of a run."""

    updates: int  # optimizer updates of a step here
    steps: int | None  # of the run; None if it is not known
    data_are_here: bool = True  # if not, the length is known once they are, and before that nothing is submitted


def translate(t: Translator, trainer: str, algorithm: str, processes: int) -> RunLength:
    """Translate batches, length, validation, checkpoints and trackers. processes: GPUs that train."""
    per_device, accumulated = t.consume("per_device_train_batch_size"), t.consume("gradient_accumulation_steps")
    update = per_device * accumulated * processes
    t.put("policy.train_global_batch_size", update, "per_device_train_batch_size")
    text = f"an update has {per_device} x {accumulated} x {processes} processes = {update} {_unit(algorithm)}"
    t.change("per_device_train_batch_size", text)
    t.put("policy.train_micro_batch_size", per_device, "per_device_train_batch_size")
    t.put("policy.sequence_packing.enabled", t.get("packing") is True, "per_device_train_batch_size")
    sampled, updates = _generation(t, per_device * processes, update, accumulated) if algorithm == "grpo" else (update, 1)
    records = sampled // t.get("num_generations") if algorithm == "grpo" else update
    steps, is_here = _steps(t, algorithm, records, updates, per_device * processes, accumulated)
    _validation(t, algorithm, steps, updates)
    _checkpoints(t, algorithm, steps, updates)
    _trackers(t)
    t.put(f"{algorithm}.seed", t.consume("seed"), "seed")
    apply(t, RULES)
    return RunLength(updates, steps, is_here)


def _unit(algorithm: str) -> str:
    return {"grpo": "completions", "sft": "sequences", "kto": "answers"}.get(algorithm, "pairs")


def _generation(t: Translator, micro: int, update: int, accumulated: int) -> tuple[int, int]:
    """Translate TRL's generation batch. Return (completions of a step, updates of a step)."""
    size, per_generation, group = (
        t.consume("generation_batch_size"),
        t.consume("steps_per_generation"),
        t.get("num_generations"),
    )
    if size is not None and per_generation is not None:
        t.problem(
            "generation_batch_size", "contradiction", f"got {size} with steps_per_generation={per_generation}; TRL takes one"
        )
    key = "steps_per_generation" if per_generation is not None or size is None else "generation_batch_size"
    size = size if size is not None else micro * (per_generation if per_generation is not None else accumulated)
    sampled = max(size, update)
    if size % group:
        text = f"the generation batch has {size} completions; expected a multiple of num_generations={group}"
        t.problem(key if t.origins.get(key) else "num_generations", "not-divisible", text)
    elif sampled % min(size, update) or sampled % group:
        text = f"an update has {update} completions and a generation batch {size}; expected that one divides the other"
        t.problem(key, "not-divisible", f"{text}, and num_generations={group} the larger one")
    updates = max(1, sampled // update)
    t.put("grpo.num_prompts_per_step", max(1, sampled // group), key)
    t.put("grpo.num_generations_per_prompt", t.consume("num_generations"), "num_generations")
    if updates > 1:
        text = f"a step samples {sampled} completions and has {updates} updates. Steps of the schedule count such steps"
        t.change(key, text)
    return sampled, updates


# ---- length ----------------------------------------------------------------------------------------------------------------


def _steps(t: Translator, algorithm: str, records: int, updates: int, micro: int, accumulated: int) -> tuple[int | None, bool]:
    """Translate the run's length. Return (its steps, whether the data are on this machine).

    records: of a step. micro: records of a microbatch of all processes.
    """
    most, epochs = t.consume("max_steps"), t.consume("num_train_epochs")
    if isinstance(most, int) and most > 0:
        steps = math.ceil(most / updates)
        t.put(f"{algorithm}.max_num_steps", steps, "max_steps")
        t.put(f"{algorithm}.max_num_epochs", UNBOUNDED, "num_train_epochs")
        return steps, True
    number, is_here = _records(t)
    if number is not None:
        in_epoch = number // records if algorithm == "grpo" else math.ceil(math.ceil(number / micro) / accumulated)
        steps = math.ceil(epochs * max(1, in_epoch))
        t.put(f"{algorithm}.max_num_steps", steps, "num_train_epochs")
        t.put(f"{algorithm}.max_num_epochs", UNBOUNDED, "num_train_epochs")
        t.change("num_train_epochs", f"{epochs:g} passes over {number} records are {steps} steps")
        return steps, True
    t.put(f"{algorithm}.max_num_steps", UNBOUNDED, "max_steps")
    t.put(f"{algorithm}.max_num_epochs", max(1, math.ceil(epochs)), "num_train_epochs")
    if epochs != int(epochs) and is_here:
        text = f"got {epochs} of data whose number of records is not known; expected a whole number. Try --max_steps STEPS"
        t.problem("num_train_epochs", "missing-value", text)
    return None, is_here


def _records(t: Translator) -> tuple[int | None, bool]:
    """Return (the number of training records, or None if it is not known; whether the data are on this machine)."""
    entries: Any = t.get("datasets")
    if not entries:
        parts = [(t.get("dataset_name"), t.get("dataset_config"), t.get("dataset_train_split"))]
    elif any(isinstance(entry, dict) and entry.get("fraction") is not None for entry in entries):
        return None, True
    else:
        parts = [(entry.get("path"), entry.get("name"), entry.get("split", "train")) for entry in entries]
    if not all(isinstance(name, str) and record_counts.is_here(name) for name, _, _ in parts):
        return None, False
    counts = [record_counts.count(*part) for part in parts]
    return (None, True) if None in counts else (sum(filter(None, counts)), True)


# ---- validation, checkpoints, trackers -------------------------------------------------------------------------------------


def _period(value: Any, steps: int | None, updates: int) -> int | None:
    """Return a number of steps of one of updates, or of a share of the run; None if the run's length is not known."""
    if isinstance(value, float) and value < 1:
        return None if steps is None else max(1, math.ceil(value * steps))
    return max(1, int(value) // updates)


def _validation(t: Translator, algorithm: str, steps: int | None, updates: int) -> None:
    strategy, every = t.get("eval_strategy"), t.get("eval_steps")
    on = strategy not in ("no", False, None)
    period: int | None = 0
    if on:
        epochs = max(1, round(t.get("num_train_epochs")))
        in_epoch = None if steps is None else max(1, steps // epochs)
        period = in_epoch if strategy == "epoch" else _period(every or t.get("logging_steps") or 10, steps, updates)
        if period is None:
            text = "the number of steps is not known, so that the run validates only at its end"
            t.change(f"eval_strategy={strategy}", f"{text}; {algorithm}.val_period=STEPS sets a period")
    t.put(f"{algorithm}.val_period", period or 0, "eval_steps" if strategy == "steps" else "eval_strategy")
    t.put(f"{algorithm}.val_at_start", on and t.on("eval_on_start"), "eval_on_start")
    t.put(f"{algorithm}.val_at_end", on, "eval_strategy")
    t.put(f"{algorithm}.max_val_samples", UNBOUNDED, "eval_strategy")


def _checkpoints(t: Translator, algorithm: str, steps: int | None, updates: int) -> None:
    strategy, every = t.get("save_strategy"), t.get("save_steps")
    on = strategy not in ("no", False, None)
    t.put("checkpointing.enabled", on, "save_strategy")
    if not on:
        t.change(f"save_strategy={str(strategy).lower()}", "the run saves no checkpoint, and cannot be continued or exported")
        return
    epochs = max(1, round(t.get("num_train_epochs")))
    period = _period(every, steps, updates) if strategy == "steps" else None if steps is None else max(1, steps // epochs)
    if period is None:
        text = "the number of steps is not known; a checkpoint is saved every 100 steps"
        t.change(f"save_strategy={strategy}", f"{text}; checkpointing.save_period=STEPS sets a period")
    t.put("checkpointing.save_period", period or 100, "save_steps" if strategy == "steps" else "save_strategy")
    t.put("checkpointing.keep_top_k", t.get("save_total_limit"), "save_total_limit")


def _trackers(t: Translator) -> None:
    names = put_trackers(t, "report_to", ("none", "tensorboard", None, "all"))
    project = t.get("wandb_project") or t.get("project")
    if "wandb" in names:
        t.put("logger.wandb.project", project, "project")
        if t.get("run_name"):
            t.put("logger.wandb.name", t.get("run_name"), "run_name")

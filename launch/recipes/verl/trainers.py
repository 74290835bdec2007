"""Translate `trainer`, checkpoints, trackers and GPUs, and ignore the sections of verl's infrastructure."""

from __future__ import annotations

from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.tracker_keys import put_trackers
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import scored_files
from launch.recipes.verl.verl_defaults import ACTOR, REF, ROLLOUT
from pipeline.algorithms.sections import UNBOUNDED

"""verl's trackers that are ours too."""
ASYNCHRONOUS = "asynchronous training by verl's keys"
CHECKPOINT = "a checkpoint has the model, the optimizer and the position in the data"
RULES = (
    Done("trainer.total_epochs trainer.total_training_steps trainer.logger trainer.project_name trainer.experiment_name"),
    Done("trainer.nnodes trainer.n_gpus_per_node trainer.save_freq trainer.test_freq trainer.val_before_train"),
    Done("trainer.critic_warmup trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep trainer.val_only trainer.seed"),
    Only("trainer.v1.trainer_mode", ("sync", None), ASYNCHRONOUS, "sync, or grpo.async_grpo.enabled=true of Hetstep"),
    Only("trainer.device", ("cuda", None), "this kind of accelerator", "cuda"),
    Only("trainer.resume_mode", ("auto", "disable", None), "a start from a chosen checkpoint of verl", "auto"),
    Only("trainer.v1.sampler.custom_sampler.path", (None,), "a sampler of the user", "null"),
    Ignored("trainer.resume_from_path"),
    Ignored("trainer.default_local_dir", "a run writes all files below run_dir"),
    Ignored("trainer.default_hdfs_dir trainer.del_local_ckpt_after_load trainer.max_critic_ckpt_to_keep trainer.use_v1"),
    Ignored("trainer.esi_redundant_time trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir"),
    Ignored("trainer.ray_wait_register_center_timeout trainer.v1.* trainer.use_legacy_worker_impl trainer.profile_interval"),
    Ignored("trainer.balance_batch"),
    Done(f"{ACTOR}.checkpoint.async_save"),
    Ignored(f"{ACTOR}.checkpoint.* checkpoint.*", CHECKPOINT),
    Changed(f"{ACTOR}.use_prefix_grouper", (False, None), "each answer is computed with its prompt: equal results, slower"),
    Only(
        f"{ACTOR}.router_replay.mode",
        ("disabled", None),
        "replay of routing by this key",
        f"{ACTOR}.megatron.router_replay.mode=R3",
    ),
    Only(f"{ACTOR}.qat.enable", (False, None), "quantization-aware training", "false"),
    Ignored(
        f"{ACTOR}.strategy {ACTOR}.model_engine {ACTOR}.freeze_vision_tower {ACTOR}.use_torch_compile {ACTOR}.entropy_*"
        f" {ACTOR}.pad_to_length"
    ),
    Ignored(f"{ACTOR}.use_fused_kernels {ACTOR}.use_remove_padding {ACTOR}.qat.* {ACTOR}.router_replay.* {ACTOR}.load_weight"),
    Ignored("*.profiler.* *._target_ actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout"),
    Ignored("global_profiler.* profiler.* ray_kwargs.* skip.* transfer_queue.* npu_profile.* hydra.* prometheus.*"),
    Ignored(f"{REF}.*"),  # the reference policy has the actor's layout
    Only("async_training.* rollout.*", (None,), ASYNCHRONOUS, "verl.trainer.main_ppo"),
)


def steps(t: Translator, batch_key: str) -> int | None:
    """Return the number of steps of the run; None if it follows from data that are not on this machine.

    Without total_training_steps it is that of the passes over the files' records, each without its last incomplete batch.
    batch_key: the key of the records of a step.
    """
    value = t.get("trainer.total_training_steps")
    if isinstance(value, int) and value > 0:
        return value
    size, passes = t.get(batch_key), t.get("trainer.total_epochs")
    records = scored_files.count_records(t.get("data.train_files"))
    if records is None or not isinstance(size, int) or not isinstance(passes, int) or size < 1:
        return None
    most = t.get("data.train_max_samples")
    return (min(records, most) if isinstance(most, int) and most > 0 else records) // size * passes


def translate(t: Translator, algorithm: str) -> None:
    """Translate the trainer of an algorithm that samples."""
    common(t, algorithm, "trainer.max_actor_ckpt_to_keep")
    before = t.consume("trainer.val_before_train")
    t.put(f"{algorithm}.val_at_start", bool(before and t.get("data.val_files")), "trainer.val_before_train")
    if t.consume("trainer.val_only") is True:
        t.put(f"{algorithm}.max_num_steps", 0, "trainer.val_only")
    t.put(f"{algorithm}.max_val_samples", UNBOUNDED, "data.val_max_samples")
    if isinstance(seed := t.consume("data.seed"), int):
        t.put(f"{algorithm}.seed", seed, "data.seed")
    if algorithm == "ppo":
        warm_up: Any = t.get(
            "trainer.critic_warmup"
        )  # the policy learns from this step on, of steps that start at 1; ours at 0
        start = max(0, warm_up - 1) if isinstance(warm_up, int) else warm_up
        t.put("ppo.policy_training_start_step", start, "trainer.critic_warmup")
    _colocation(t)
    t.put("checkpointing.async_save", t.get(f"{ACTOR}.checkpoint.async_save") is True, f"{ACTOR}.checkpoint.async_save")
    apply(t, RULES)


def common(t: Translator, algorithm: str, keeps: str) -> None:
    """Translate the length of the run, validation, checkpoints, trackers and the train ranks. keeps: verl's key of how many."""
    number = t.get("trainer.total_training_steps")
    t.put(f"{algorithm}.max_num_steps", UNBOUNDED if number is None else number, "trainer.total_training_steps")
    t.put(f"{algorithm}.max_num_epochs", t.get("trainer.total_epochs"), "trainer.total_epochs")
    test = _period(t, "trainer.test_freq")
    t.put(f"{algorithm}.val_period", test or 0, "trainer.test_freq")
    t.put(f"{algorithm}.val_at_end", test is not None, "trainer.test_freq")
    save = _period(t, "trainer.save_freq")
    t.put("checkpointing.enabled", save is not None, "trainer.save_freq")
    if save is not None:
        t.put("checkpointing.save_period", save, "trainer.save_freq")
    else:
        text = "the run saves no checkpoint, as in verl, and cannot be continued"
        t.change(f"trainer.save_freq={t.get('trainer.save_freq')}", text)
    t.put("checkpointing.keep_top_k", t.get(keeps), keeps)
    _trackers(t)
    for ours, theirs in (("nodes", "trainer.nnodes"), ("gpus_per_node", "trainer.n_gpus_per_node")):
        t.put(f"cluster.train.{ours}", t.get(theirs), theirs)


def _period(t: Translator, key: str) -> int | None:
    """Return the steps between two validations or checkpoints; None for none of them."""
    value: Any = t.get(key)
    if value == "after_each_epoch":
        total, passes = steps(t, "data.train_batch_size"), t.get("trainer.total_epochs")
        if total is not None and isinstance(passes, int) and total >= passes > 0 and not t.get("trainer.total_training_steps"):
            return total // passes
        message = f"got {value}, but the files of the data are not on this machine; expected a number. Try {key}=STEPS"
        t.problem(key, "missing-value", message)
        return None
    return value if isinstance(value, int) and value > 0 else None


def _trackers(t: Translator) -> None:
    names = put_trackers(t, "trainer.logger", ("console", "tensorboard", "file", None))
    project, run = t.get("trainer.project_name"), t.get("trainer.experiment_name")
    if "wandb" in names:
        t.put("logger.wandb.project", project, "trainer.project_name")
        t.put("logger.wandb.name", run, "trainer.experiment_name")
    if "mlflow" in names:
        t.put("logger.mlflow.experiment_name", project, "trainer.project_name")
        t.put("logger.mlflow.run_name", run, "trainer.experiment_name")


def _colocation(t: Translator) -> None:
    """Translate the engines' GPUs: the train ranks' in turn, or rollout.nnodes nodes of their own."""
    nodes = t.get(f"{ROLLOUT}.nnodes")
    separate = isinstance(nodes, int) and nodes > 0
    t.put("policy.generation.colocated.enabled", not separate, f"{ROLLOUT}.nnodes")
    if separate:
        t.put("cluster.generate.nodes", nodes, f"{ROLLOUT}.nnodes")
        gpus = t.get(f"{ROLLOUT}.n_gpus_per_node", t.get("trainer.n_gpus_per_node"))
        t.put("cluster.generate.gpus_per_node", gpus, f"{ROLLOUT}.n_gpus_per_node")

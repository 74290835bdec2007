"""`checkpointing`, `logger`, and what only their infrastructure reads."""

from __future__ import annotations

from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Changed, Only, apply, ignored, same, under

CHECKPOINTING = under(
    "checkpointing",
    (
        same("enabled", "save_period", "keep_top_k", "higher_is_better", "save_consolidated", "checkpoint_must_save_by"),
        ignored("checkpoint_dir", why="a run writes all it writes below run_dir"),
        Changed(("ft_save_period", "ft_keep_latest_k"), (None,), "save_period says when; the latest is always kept"),
        Changed(("save_optimizer",), (True, None), "a checkpoint always has the optimizer's state"),
        Only(("pretrained_checkpoint.*",), (None,), Feature.PRETRAINED, "policy.model_name may be a folder"),
        ignored("model_save_format", "model_cache_dir", "model_repo_id", "is_peft", "peft_config.*", "is_async"),
    ),
)

LOGGER = (
    same("logger.tensorboard_enabled"),
    ignored("logger.log_dir", "logger.tensorboard.*", "logger.num_val_samples_to_print"),
    ignored("logger.monitor_gpus", "logger.gpu_monitoring.*"),
)
SERVICES = {"wandb": "Weights & Biases", "swanlab": "SwanLab", "mlflow": "MLflow"}

INFRASTRUCTURE = (
    Only(("on_policy_distillation.*",), (None,), Feature.SEVERAL_TEACHERS, "null"),
    ignored("teacher", "teachers"),  # null
)

METRICS = {  # theirs -> ours, where the names differ
    "val:val_loss": "val:loss",
    "val:validation-default_loss": "val:loss",
    "val:validation-default_accuracy": "val:accuracy",
    "train:train_loss": "train:loss",
}


def translate(ledger: Ledger) -> None:
    metric = ledger.take("checkpointing.metric_name")
    if ledger.has("checkpointing.metric_name"):
        ledger.put("checkpointing.metric_name", METRICS.get(metric, metric), "checkpointing.metric_name")
    apply(ledger, CHECKPOINTING)
    _services(ledger)
    apply(ledger, LOGGER)
    if ledger.get("data_plane.enabled") is True:
        ledger.ignore("data_plane.*", "samples travel through torch.distributed, whatever their size")
    ledger.take("data_plane")
    if ledger.get("async_rl") is not None:
        ledger.lacks("async_rl", "a section", Feature.ASYNC, "the section grpo alone")
        ledger.take("async_rl")
    apply(ledger, INFRASTRUCTURE)


def _services(ledger: Ledger) -> None:
    """Of those that are off nobody misses anything."""
    on = []
    for service, name in SERVICES.items():
        if ledger.take(f"logger.{service}_enabled") is True:
            on.append((f"logger.{service}.*", name))
        ledger.take(f"logger.{service}")
    if on:
        names = " and ".join(name for _, name in on)
        ledger.ignore(", ".join(key for key, _ in on), f"no {names} here; metrics.jsonl is always written")

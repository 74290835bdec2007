"""Translate `checkpointing`, `logger`, and sections that only NeMo-RL's infrastructure reads."""

from __future__ import annotations

from launch.recipes.translation.rules import Changed, Ignored, Only, Same, apply, if_set, under
from launch.recipes.translation.translator import ABSENT, Translator

PRETRAINED = "a start from a checkpoint that is not in Hugging Face format"
TEXT = "Hetstep trains only the text part of a model"
METRICS = {  # NeMo-RL's metric -> ours, if the names differ
    "val:val_loss": "val:loss",
    "val:validation-default_loss": "val:loss",
    "val:validation-default_accuracy": "val:accuracy",
    "train:train_loss": "train:loss",
}
TRACKERS = {  # NeMo-RL's trackers that are ours too -> the keys with the same meaning
    "wandb": "project name entity group tags notes mode",
    "mlflow": "experiment_name run_name tracking_uri artifact_location tags",
}

CHECKPOINTING = under(
    "checkpointing",
    (
        Same("metric_name", lambda metric: METRICS.get(metric, metric)),
        Same("enabled save_period keep_top_k higher_is_better save_consolidated checkpoint_must_save_by"),
        Ignored("checkpoint_dir", "a run writes all files below run_dir"),
        Changed(
            "ft_save_period ft_keep_latest_k", (None,), "save_period sets the interval; the latest checkpoint is always kept"
        ),
        Changed("save_optimizer", (True, None), "a checkpoint always has the optimizer's state"),
        Only("pretrained_checkpoint.*", (None,), PRETRAINED, "policy.model_name=FOLDER"),
        Ignored("model_save_format model_cache_dir model_repo_id is_peft peft_config.* is_async"),
    ),
)
OTHERS = (
    Same("logger.tensorboard_enabled"),
    Same("logger.gpu_monitoring.collection_interval", ours="logger.monitor.period_s"),
    Same("logger.monitor_gpus", lambda on: None if on is False else ABSENT, ours="logger.monitor.period_s"),
    Ignored("logger.log_dir logger.tensorboard.* logger.num_val_samples_to_print logger.gpu_monitoring.*"),
    Ignored("teacher teachers"),  # null
)


def translate(t: Translator) -> None:
    """Translate `checkpointing` and `logger`, and ignore the sections of NeMo-RL's infrastructure."""
    apply(t, CHECKPOINTING)
    for tracker, keys in TRACKERS.items():
        _translate_tracker(t, tracker, keys)
    if t.consume("logger.swanlab_enabled") is True:
        t.ignore("logger.swanlab.*", "SwanLab is not supported; metrics.jsonl is always written")
    t.consume("logger.swanlab")
    if t.on("data_plane.enabled"):
        t.ignore("data_plane.*", "torch.distributed transfers samples of any size")
    t.consume("data_plane")
    apply(t, OTHERS)


def _translate_tracker(t: Translator, tracker: str, keys: str) -> None:
    """Translate the switch of a tracker, and its section if it is on. keys: keys of the section with the same meaning."""
    enabled, section = f"logger.{tracker}_enabled", f"logger.{tracker}"
    if t.consume(enabled) is not True:
        t.consume(section)
        return
    t.put(enabled, True)
    patterns = " ".join(f"{section}.{key}" for key in keys.split())
    apply(t, (Same(f"{patterns} {section}.tags.*", if_set),))
    for key, value in list(t.unconsumed_leaves()):
        if key.startswith(f"{section}."):
            t.consume(key)
            if value is not None:
                t.ignore(key, f"not passed on to {tracker}")
    t.consume(section)

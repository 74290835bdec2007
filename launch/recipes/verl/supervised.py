"""Translate `verl.trainer.sft_trainer`: supervised fine-tuning on messages."""

from __future__ import annotations

import os
from typing import Any

from launch.recipes.translation.rules import Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import optimizers, train_engines, trainers

RULES = (
    Done("data.train_batch_size data.micro_batch_size_per_gpu data.max_token_len_per_gpu data.use_dynamic_bsz data.max_length"),
    Done("data.messages_key data.tools_key data.train_files data.val_files data.train_max_samples data.val_max_samples"),
    Only("data.custom_cls.path", (None,), "a data set class of verl", "null"),
    Only("data.multiturn.enable", (True, None), "SFT on columns of a prompt and a response", "true, and data.messages_key"),
    Ignored("data.enable_thinking_key data.enable_thinking_default data.pad_mode data.balance_dp_token data.use_shm"),
    Ignored("data.custom_cls.* data.num_workers data.ignore_input_ids_mismatch data.chat_template data.multiturn.*"),
    Ignored("engine._target_ optim._target_ model._target_ data.truncation"),
)


def translate(t: Translator, engine: str) -> None:
    """Translate supervised fine-tuning."""
    t.put("algorithm", "sft", "data.train_files")
    steps = trainers.steps(t, "data.train_batch_size")
    _batches(t, engine)
    _data(t)
    train_engines.translate(t, "model", "engine", engine)
    optimizers.translate(t, "optim", "policy", engine, steps)
    if engine == "dp":
        t.put("policy.max_grad_norm", t.get("optim.clip_grad"), "optim.clip_grad")
    t.put("sft.seed", t.consume("trainer.seed"), "trainer.seed")
    t.put("sft.max_val_samples", trainers.UNBOUNDED, "data.val_max_samples")
    trainers.common(t, "sft", "trainer.max_ckpt_to_keep")
    apply(t, (*RULES, *trainers.RULES))


def _batches(t: Translator, engine: str) -> None:
    dynamic, ranks = t.get("data.use_dynamic_bsz") is True, train_engines.sequence_ranks(t, "engine", engine)
    t.put("policy.train_global_batch_size", t.get("data.train_batch_size"), "data.train_batch_size")
    t.put("policy.train_micro_batch_size", t.get("data.micro_batch_size_per_gpu"), "data.micro_batch_size_per_gpu")
    t.put("policy.sequence_packing.enabled", dynamic, "data.use_dynamic_bsz")
    if dynamic and isinstance(tokens := t.get("data.max_token_len_per_gpu"), int):
        t.put("policy.sequence_packing.train_mb_tokens", tokens * ranks, "data.max_token_len_per_gpu")
    t.put("policy.max_total_sequence_length", t.get("data.max_length"), "data.max_length")


def _data(t: Translator) -> None:
    if (truncation := t.get("data.truncation")) != "error":
        t.put("data.overlong_prompts", "drop", "data.truncation")
        t.change(f"data.truncation={truncation}", "longer sequences are left out; verl cuts them")
    kwargs = t.consume("data.apply_chat_template_kwargs")
    if kwargs:
        t.put("policy.tokenizer.chat_template_kwargs", kwargs, "data.apply_chat_template_kwargs")
    for ours, files_key, most_key in (
        ("train", "data.train_files", "data.train_max_samples"),
        ("validation", "data.val_files", "data.val_max_samples"),
    ):
        files: Any = t.get(files_key)
        paths = [os.path.expanduser(str(path)) for path in (files if isinstance(files, list) else [files]) if path]
        if not paths:
            continue
        several = "datasets" if ours == "train" else "validations"
        if len(paths) > 1 and ours == "train":
            t.put("data.train", None, files_key)
        for number, path in enumerate(paths):
            key = f"data.{ours}" if len(paths) == 1 else f"data.{several}.part_{number}"
            t.put(f"{key}.data_path", path, files_key)
            t.put(f"{key}.messages_key", t.get("data.messages_key"), "data.messages_key")
            t.put(f"{key}.tools_key", t.get("data.tools_key"), "data.tools_key")
            if isinstance(most := t.get(most_key), int) and most > 0:
                t.put(f"{key}.max_samples", most, most_key)
                if len(paths) > 1 and number == 0:
                    t.change(most_key, f"{most} records of each file; in verl of all files together")

"""Values of other projects' recipes and of papers that ours must equal: `sources/*.yaml`, each with its provenance.

A file of NeMo-RL's has the keys that decide what is learned, as NeMo-RL resolves them, in its own words:

    repository, commit, path    where it stands
    over                        another file here, which it has but for what it says itself
    values                      dotted key -> value; absent: keys of `over` that it does not have
    given                       key=value for what it leaves to the user

A file of another source has `values` in our keys, each value under the place where the source says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from launch.recipes import reading
from pipeline.config import Recipe

FOLDER = Path(__file__).parent / "sources"
NEMO_RL = "https://github.com/NVIDIA-NeMo/RL"

DECIDES = (  # of NeMo-RL's keys, what decides what is learned, and what a translation cannot do without
    *(f"{section}.*" for section in ("grpo", "ppo", "distillation", "sft", "dpo", "rm", "loss_fn", "value_loss_fn")),
    *(
        f"{model}.{key}"
        for model in ("policy", "value", "teacher")
        for key in (
            "model_name",
            "tokenizer.name",
            "tokenizer.chat_template*",
            "hf_config_overrides.*",
            "train_global_batch_size",
            "max_total_sequence_length",
            "precision",
            "max_grad_norm",
            "optimizer.*",
            "scheduler",
            "reward_model_cfg.*",
            "dtensor_cfg.enabled",
            "dtensor_cfg.lora_cfg.*",
            "megatron_cfg.enabled",
            "megatron_cfg.optimizer.*",
            "megatron_cfg.scheduler.*",
            "megatron_cfg.freeze_moe_router",
            "megatron_cfg.moe_router_*",
            "megatron_cfg.moe_aux_loss_coeff",
            "megatron_cfg.apply_rope_fusion",
            "megatron_cfg.mtp_num_layers",
        )
    ),
    *(f"policy.generation.{key}" for key in ("backend", "max_new_tokens", "temperature", "top_*", "val_*", "stop_*")),
    "policy.generation.vllm_cfg.logprobs_mode",
    "policy.generation.colocated.*",
    "data.*",
    "env.math.*",
    "cluster.num_nodes",
    "cluster.gpus_per_node",
)
SAYS_NOTHING = (  # of those: how much of it runs where
    "*.async_grpo.max_generation_failures",
    "*.async_ppo.*",
    "*.val_micro_batch_size",
    "data.num_workers",
    "*.foreach",
    "*.fused",
    "data.use_multiple_dataloader",
    "*.optimizer.*fp16",
    "*.optimizer.bf16",
    "*.optimizer.params_dtype",
    "*.optimizer.*offload*",
    "*.optimizer.overlap_cpu*",
    "*.optimizer.sgd_momentum",
    "*.optimizer.use_*_optimizer",
    "*.lora_cfg.use_triton",
    "*.lora_cfg.dropout_position",
)


@dataclass(frozen=True)
class Source:
    name: str
    repository: str
    commit: str | None
    path: str  # in the repository; of a paper its address
    values: Mapping[str, Any]  # by dotted key
    over: str | None = None
    given: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)  # of a paper's values: where it says so

    @property
    def is_nemo_rls(self) -> bool:
        return self.repository == NEMO_RL


def read(name: str) -> Source:
    """Return a source from `sources/`, merged over its parents."""
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    values, places = {}, {}
    if raw.get("over"):
        values = {key: value for key, value in read(raw["over"]).values.items() if key not in raw.get("absent", ())}
    if raw["repository"] == NEMO_RL:
        values |= raw["values"]
    else:
        places = {key: place for place, keys in raw["values"].items() for key in keys}
        values = {key: value for keys in raw["values"].values() for key, value in keys.items()}
    return Source(
        name,
        raw["repository"],
        raw.get("commit"),
        raw["path"],
        values,
        raw.get("over"),
        tuple(raw.get("given", ())),
        places,
    )


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def imported(source: Source, folder: Path) -> Recipe:
    """Return a source of NeMo-RL's as an import translates it, at its complete keys. Raises RecipeError."""
    path = folder / f"{source.name}.yaml"
    path.write_text(yaml.safe_dump(tree(source, folder), sort_keys=False))
    return reading.load(str(path), source.given)


def tree(source: Source, folder: Path) -> dict[str, Any]:
    """Its values as a recipe of theirs. The files that it names are made in `folder`: only their names are compared."""
    root: dict[str, Any] = {}
    for key, value in source.values.items():
        *parents, last = key.split(".")
        section = root
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
        if last in ("prompt_file", "system_prompt_file") and value:
            (folder / value).parent.mkdir(parents=True, exist_ok=True)
            (folder / value).write_text("{}")
    return root


def deciding(leaves: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Return the values of a NeMo-RL recipe that are compared."""
    leaves = list(leaves)
    off = {key.removesuffix("enabled") for key, value in leaves if key.endswith(".enabled") and value is False}
    off -= {"policy.generation.colocated."}  # which says then where engines run
    for key, value in leaves:
        if not any(fnmatchcase(key, pattern) or f"{key}.*" == pattern for pattern in DECIDES):
            continue
        if any(fnmatchcase(key, pattern) for pattern in SAYS_NOTHING):
            continue
        if any(key.startswith(section) and key != f"{section}enabled" for section in off):
            continue
        yield key, value

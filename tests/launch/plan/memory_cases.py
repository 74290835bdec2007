"""Small runs of the real backends, as recipes, whose measured memory the plan's prediction is compared with.

Every sequence is the longest and every microbatch is full, which is what the plan assumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from launch.plan import memory
from launch.plan.rank_division import train_parallelism
from launch.recipes.model_files import read_json
from pipeline import config
from pipeline.config import RECIPES, Recipe
from pipeline.models.shape import ModelShape

# 52 million parameters
MEDIUM = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
}
VOCABULARY = {"vocab_size": 32000}  # the head is nearly all that there is
FSDP, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
# 64 sequences of 32 tokens: four microbatches on one rank, two on each of two.
BATCHES = (
    "policy.train_global_batch_size=64",
    "policy.sequence_packing.train_mb_tokens=512",
    "policy.sequence_packing.logprob_mb_tokens=512",
)


@dataclass(frozen=True)
class Case:
    """Some steps of one recipe."""

    name: str
    recipe: str = "tiny_sft"
    model: str = "tiny"  # a folder beside the recipes
    ranks: int = 1
    gpus: int = 0
    overrides: tuple[str, ...] = ()
    changes: dict[str, int] = field(default_factory=dict)  # of the model's config

    def load(self) -> Recipe:
        overrides = [
            f"policy.model_name={RECIPES / self.model}",
            "policy.random_init=true",
            "run_dir=runs/unused",
            f"cluster.train.ranks_per_node={self.ranks}",
            f"cluster.train.gpus_per_node={self.gpus}",
            *self.overrides,
        ]
        recipe = config.load(self.recipe, overrides)
        return replace(recipe, policy=replace(recipe.policy, hf_config_overrides=dict(self.changes)))

    def shapes(self, recipe: Recipe) -> dict[str, ModelShape]:
        """Return the shape that all models of the recipe share."""
        shape = ModelShape.of(read_json(RECIPES / self.model / "config.json") | self.changes)
        return dict.fromkeys(config.models(recipe), shape)

    @property
    def small(self) -> Case:
        return replace(self, changes={})

    def predicted(self) -> tuple[float, str]:
        """Return (bytes of tensors of the fullest rank, when).

        The runs make no refit, so its staging and merged weights are left out. A CUDA context is not made of tensors.
        """
        recipe = self.load()
        shapes = self.shapes(recipe)
        found = memory.train(recipe, shapes)
        apart = memory.staging(recipe, shapes["policy"], train_parallelism(recipe.policy, recipe.cluster.train))
        left_out = apart + sum(found.parts.get(part, 0.0) for part in ("runtime", "merged weights"))
        return found.total - left_out, found.phase


def _grid() -> list[Case]:
    """Return cases of both backends and models, one rank and two, both precisions, activations kept and recomputed."""
    found = []
    for backend, key in (("fsdp", FSDP), ("megatron", MEGATRON)):
        for model in ("tiny", "tiny_moe"):
            for ranks in (1, 2):
                for precision in ("float32", "bfloat16"):
                    for again in ("", "_recomputed"):
                        name = f"{backend}_{model}_{ranks}_{precision}{again}"
                        overrides = (f"{key}.enabled=true", f"policy.precision={precision}")
                        if again:
                            overrides += (f"{key}.activation_checkpointing=true",)
                        found.append(Case(name, model=model, ranks=ranks, overrides=(*BATCHES, *overrides)))
    return found


def _selective() -> list[Case]:
    """Return cases of FSDP2 with selective activation recomputation."""
    on = (f"{FSDP}.enabled=true", f"{FSDP}.activation_checkpointing=true", f"{FSDP}.recompute_granularity=selective")
    return [
        Case(f"fsdp_{model}_1_{precision}_selective", model=model, overrides=(*BATCHES, *on, f"policy.precision={precision}"))
        for model in ("tiny", "tiny_moe")
        for precision in ("float32", "bfloat16")
    ]


def _layouts() -> list[Case]:
    sizes = {
        "fsdp_tp2": (FSDP, {"tensor_parallel_size": 2}),
        "fsdp_cp2": (FSDP, {"context_parallel_size": 2}),
        "fsdp_tp2_sp": (FSDP, {"tensor_parallel_size": 2, "sequence_parallel": "true"}),
        "fsdp_replicas2": (FSDP, {"data_parallel_replicate_size": 2}),
        "fsdp_tp2_cp2": (FSDP, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
        "fsdp_ep2": (FSDP, {"expert_parallel_size": 2}),
        "fsdp_tp2_ep2": (FSDP, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
        "fsdp_lora": (FSDP, {"lora_cfg.enabled": "true"}),
        "megatron_tp2": (MEGATRON, {"tensor_model_parallel_size": 2}),
        "megatron_tp2_sp": (MEGATRON, {"tensor_model_parallel_size": 2, "sequence_parallel": "true"}),
        "megatron_pp2": (MEGATRON, {"pipeline_model_parallel_size": 2}),
        "megatron_cp2": (MEGATRON, {"context_parallel_size": 2}),
        "megatron_ep2": (MEGATRON, {"expert_model_parallel_size": 2}),
    }
    found = []
    for name, (key, layout) in sizes.items():
        overrides = (f"{key}.enabled=true", *(f"{key}.{size}={value}" for size, value in layout.items()))
        model = "tiny_moe" if name.endswith("ep2") else "tiny"
        ranks = 4 if name == "fsdp_tp2_cp2" else 2
        found.append(Case(name, model=model, ranks=ranks, overrides=(*BATCHES, *overrides)))
    return found


def _recipes() -> list[Case]:
    """Return the tiny recipes unchanged, on both backends."""
    own = {
        "tiny_sft": (),
        "tiny_grpo": ("loss_fn.reference_policy_kl_penalty=0.01",),
        "tiny_ppo": (),
        "tiny_dpo": (),
        "tiny_rm": (),
        "tiny_distillation": (f"teacher.model_name={RECIPES / 'tiny'}",),
    }
    return [
        Case(f"{recipe}_{backend}", recipe, ranks=2, overrides=(f"{key}.enabled=true", *more))
        for recipe, more in own.items()
        for backend, key in (("fsdp", FSDP), ("megatron", MEGATRON))
    ]


def _large() -> list[Case]:
    found = []
    for backend, key in (("fsdp", FSDP), ("megatron", MEGATRON)):
        for precision in ("float32", "bfloat16"):
            overrides = (*BATCHES, f"{key}.enabled=true", f"policy.precision={precision}")
            found.append(Case(f"{backend}_medium_{precision}", overrides=overrides, changes=MEDIUM))
            for chunk in (128, 2048):
                chunked = (*overrides, f"policy.logprob_chunk_size={chunk}")
                found.append(Case(f"{backend}_vocabulary_{precision}_{chunk}", overrides=chunked, changes=VOCABULARY))
    return found


CASES = {case.name: case for case in (*_grid(), *_selective(), *_layouts(), *_recipes(), *_large())}

"""Tiny mixtures of experts for expert parallelism, and the checks of their ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.train import cases, model_roles, offloads, ranks
from tests.train.ranks import Layout

WITHIN = 3e-6  # of the largest gradient: see cases.tolerance


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "qwen3_moe": Qwen3MoeConfig(  # the second layer is dense
            **cases.SHAPE,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        "mixtral": MixtralConfig(
            **{**cases.SHAPE, "intermediate_size": 48},  # transformers' grouped products in half precision take multiples of 8
            num_local_experts=4,
            num_experts_per_tok=2,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        ),
        "deepseek_v3": DeepseekV3Config(
            **{**cases.SHAPE, "num_key_value_heads": 4},
            moe_intermediate_size=24,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            tie_word_embeddings=False,
        ),
    }


def write_mixtures(folder: Path) -> None:
    """Write one checkpoint per family. Every tensor is random, also the bias that balances experts."""
    for family, config in configs().items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        saved = model.state_dict()
        with torch.no_grad():
            for name, tensor in saved.items():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder / family)


def against_eager(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Compare log-probs and gradients of each family with HF eager, and the weights with the files.

    DeepSeek recomputes operators. Its experts are in the last layer, which gathers them in another order in the backward pass.
    """
    for family in families:
        recomputes = {"activation_checkpointing": family == "deepseek_v3", "recompute_granularity": "selective"}
        trained = ranks.backend(cases.policy(folder / family), layout, **recomputes)
        ranks.check_weights_are_the_files(trained, folder / family)
        ranks.check_against_eager(trained, layout, folder / family, WITHIN)


# ---- everything else that a run does ------------------------------------------------------------------------------------


def whole_runs(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    """Check recomputation, bfloat16, checkpoints, offloading, exports, a reference, a teacher and a critic."""
    for family in families:
        ranks.check_activation_checkpointing(layout, folder, family)
        ranks.check_bfloat16(layout, folder, family)
        ranks.check_save_and_load(layout, folder, family)
        offloads.check_fsdp(layout, folder, family)
        # transformers has no sequence classifier of DeepSeek
        model_roles.check_several_at_once(layout, folder, family, family, critic_too=family != "deepseek_v3")
        ranks.train_and_save_one(layout, folder / family, exported_by(folder, layout, family))


def exported_by(folder: Path, layout: Layout, family: str) -> Path:
    return folder / "exported" / f"{family}-{layout.name}"


def go_on(families: tuple[str, ...], by: Layout, layout: Layout, folder: Path) -> None:
    """Check that what the ranks of another layout, `by`, saved goes on at this one as it did there."""
    for family in families:
        trained = ranks.backend(cases.policy(folder / family, scheduler=ranks.SCHEDULER), layout)
        ranks.check_goes_on(trained, layout, folder / ranks.saved_by(by, family))

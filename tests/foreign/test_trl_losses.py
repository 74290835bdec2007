"""The loss that a command of TRL becomes has the value and the gradient of TRL's own function, where TRL is installed."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from launch.recipes.foreign import ForeignSource
from launch.recipes.trl import reading_trl
from pipeline.algorithms.loss import policy_loss
from pipeline.config import LossConfig
from pipeline.config.config_tree import ConfigMapping
from tests.algorithms.packed import Packed
from tests.algorithms.sampled import gradient_of, outputs_of, random_sampled
from tests.foreign import golden_trl

trl = pytest.importorskip("trl")
FLAGS = (
    "",
    "--epsilon_high 0.28",
    "--loss_type grpo --beta 0.04 --use_bias_correction_kl false",
    "--beta 0.04",  # k3 times the ratio
    "--delta 1.5",
    "--loss_type cispo --epsilon_high 1.5",
    "--loss_type sapo --sapo_temperature_neg 1.25",
    "--loss_type grpo --importance_sampling_level sequence --epsilon 0.05",
    "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max 1.1",
    "--use_vllm --vllm_importance_sampling_mode token_mask --vllm_importance_sampling_clip_min 0.9",
    "--use_vllm --vllm_importance_sampling_mode sequence_truncate --vllm_importance_sampling_clip_max 1.1",
    "--use_vllm --vllm_importance_sampling_clip_max 1.2",
)


def weights(packed: Packed, fields: dict[str, Any], old: torch.Tensor, generate: torch.Tensor) -> torch.Tensor:
    """Return the importance weights that TRL computes where it samples (`_generate_and_score_completions`)."""
    level, _, bounds = fields["vllm_importance_sampling_mode"].partition("_")
    logs = old - generate
    weight = torch.exp(logs.sum(-1, keepdim=True) if level == "sequence" else logs)
    low, high = fields["vllm_importance_sampling_clip_min"], fields["vllm_importance_sampling_clip_max"]
    if bounds == "truncate":
        return weight.clamp(min=low, max=high)
    return weight.masked_fill((weight < (low or 0.0)) | (weight > high), 0.0)


def of_trl(packed: Packed, fields: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, gradient) of GRPOTrainer._compute_loss, whose model gives the batch's log-probs."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports] optional package

    batch, leaf = packed.batch, packed.leaf.detach().clone().requires_grad_()

    def rows(values: torch.Tensor) -> torch.Tensor:
        counted = torch.where(batch.loss_mask, values, 0.0)
        return pad_sequence(list(counted.split(list(batch.lengths))), batch_first=True)

    mask, now, generate = rows(torch.ones_like(leaf)), rows(leaf), rows(batch.generate_logprobs)
    old = now.detach() if batch.old_logprobs is None else rows(batch.old_logprobs)
    empty = torch.zeros(len(mask), 1)
    inputs = {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": rows(batch.advantages), "old_per_token_logps": old, "num_items_in_batch": mask.sum()}
    inputs["importance_sampling_ratio"] = weights(packed, fields, old, generate)
    if batch.reference_logprobs is not None:
        inputs["ref_per_token_logps"] = rows(batch.reference_logprobs)
    trainer = MagicMock()
    trainer.configure_mock(**{name: fields[name] for name in ("beta", "loss_type", "importance_sampling_level", "use_vllm")})
    trainer.args = types.SimpleNamespace(
        **{name: fields[name] for name in ("use_bias_correction_kl", "delta", "sapo_temperature_pos", "sapo_temperature_neg")},
        steps_per_generation=1,
    )
    trainer.epsilon_low = fields["epsilon"]
    trainer.epsilon_high = fields["epsilon"] if fields["epsilon_high"] is None else fields["epsilon_high"]
    trainer.vllm_importance_sampling_correction = fields["vllm_importance_sampling_correction"]
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.current_gradient_accumulation_steps = trainer.accelerator.num_processes = 1
    trainer._entropy_bonus_enabled = trainer.aux_loss_enabled = False
    trainer.accelerator.reduce = lambda values, **_: values
    trainer.accelerator.gather = lambda values: values
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (now, torch.zeros_like(now), None)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("flags", FLAGS)
def test_loss_and_gradient(tmp_path: Path, flags: str) -> None:
    command = f"trl grpo --model_name_or_path m --dataset_name d --max_steps 1 --reward_funcs accuracy_reward {flags}"
    (tmp_path / "run.sh").write_text(command)
    found = reading_trl.read(ForeignSource(tmp_path / "run.sh", ()))
    section = found.trees[0].find("loss_fn")
    assert not found.problems and isinstance(section, ConfigMapping)
    config, fields = LossConfig(**section.plain()), golden_trl.of_trl(command, 1)
    corrected = config.reference_policy_kl_penalty != 0 and fields["use_bias_correction_kl"]
    for seed in range(5):
        packed = random_sampled(seed, reference=config.reference_policy_kl_penalty != 0, old=not corrected, noise=0.1)
        lengths = packed.batch.lengths
        advantages = torch.cat([torch.full((n,), 1.0 - 0.7 * i, dtype=torch.float64) for i, n in enumerate(lengths)])
        packed = replace(packed, batch=replace(packed.batch, advantages=advantages))  # one for each sequence, as in TRL
        ours = policy_loss(config, outputs_of(packed), packed.batch, packed.counts)
        loss, gradient = of_trl(packed, fields)
        assert gradient.abs().max() > 1e-3
        assert ours.loss.item() == pytest.approx(loss.item(), abs=1e-12)
        assert torch.allclose(gradient_of(ours.loss, packed), gradient, rtol=0, atol=1e-12)

"""One file per algorithm; what they share is pure maths beside them."""

from pipeline.algorithms.base import Objective
from pipeline.algorithms.distillation import Distillation
from pipeline.algorithms.dpo import DPO
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.ppo import PPO
from pipeline.algorithms.reward_model import RewardModel
from pipeline.algorithms.sft import SFT
from pipeline.config import Recipe, RewardedConfig


def build(recipe: Recipe) -> Objective:
    """The recipe's algorithm."""
    match recipe.algorithm:
        case "grpo":
            return GRPO(recipe.grpo, recipe.loss_fn, _updates_per_step(recipe, recipe.grpo))
        case "ppo":
            return PPO(recipe.ppo, recipe.loss_fn, recipe.value_loss_fn, _updates_per_step(recipe, recipe.ppo))
        case "distillation":
            return Distillation(recipe.distillation, recipe.loss_fn)
        case "sft":
            return SFT()
        case "dpo":
            return DPO(recipe.dpo)
        case "rm":
            return RewardModel()
    raise ValueError(f"unknown algorithm '{recipe.algorithm}'")


def _updates_per_step(recipe: Recipe, section: RewardedConfig) -> int:
    return section.num_prompts_per_step * section.num_generations_per_prompt // recipe.policy.train_global_batch_size

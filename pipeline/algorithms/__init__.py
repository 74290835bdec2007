"""One file per algorithm; what they share is pure maths beside them."""

from pipeline.algorithms.base import Objective
from pipeline.algorithms.distillation import Distillation
from pipeline.algorithms.dpo import DPO
from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.ppo import PPO
from pipeline.algorithms.rm import RewardModel
from pipeline.algorithms.sft import SFT
from pipeline.config import Recipe, updates_per_epoch


def build(recipe: Recipe) -> Objective:
    """The recipe's algorithm."""
    match recipe.algorithm:
        case "grpo":
            return GRPO(recipe.grpo, recipe.loss_fn, updates_per_epoch(recipe))
        case "ppo":
            return PPO(recipe.ppo, recipe.loss_fn, recipe.value_loss_fn, updates_per_epoch(recipe))
        case "distillation":
            return Distillation(recipe.distillation, recipe.loss_fn)
        case "sft":
            return SFT()
        case "dpo":
            return DPO(recipe.dpo)
        case "rm":
            return RewardModel()
    raise ValueError(f"unknown algorithm '{recipe.algorithm}'")

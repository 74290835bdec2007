"""One file per algorithm; what they share is pure maths beside them."""

from pipeline.algorithms.grpo import GRPO
from pipeline.algorithms.sft import SFT
from pipeline.config import Recipe


def build(recipe: Recipe) -> GRPO | SFT:
    """The recipe's algorithm."""
    if recipe.algorithm == "sft":
        return SFT()
    samples = recipe.grpo.num_prompts_per_step * recipe.grpo.num_generations_per_prompt
    return GRPO(recipe.grpo, recipe.loss_fn, updates_per_step=samples // recipe.policy.train_global_batch_size)

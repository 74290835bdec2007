"""Episodes on generate ranks: prompts in, groups of rewarded rollouts out."""

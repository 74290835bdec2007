"""What rank 0 does around and within a step by calls of the roles: rollouts, rewards, refits, progress, saving, logging."""

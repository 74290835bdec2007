"""Coordinate a run from rank 0 by calls of the roles: rollouts, rewards, refits, progress, saving and logging."""

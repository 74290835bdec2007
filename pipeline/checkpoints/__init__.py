"""Write checkpoints that a kill cannot corrupt, and verify them before they are read."""

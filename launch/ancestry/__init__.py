"""What runs, checkpoints, exports and evaluations are made from: recorded at submission and export, and read as one graph."""

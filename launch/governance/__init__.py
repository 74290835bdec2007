"""Record what runs, checkpoints, exports and evaluations are made from, and read the records as one graph."""

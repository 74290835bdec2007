"""Read and write a run as files: its folder, its state, its evaluations, and the requests that commands leave in it."""

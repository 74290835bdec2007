"""Code that runs inside the job. Start with `main.py`, every rank's entry point, and `coordinator.py`, the training loops."""

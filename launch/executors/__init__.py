"""Executors run every rank of a job: `slurm`, `allocation` (inside an salloc or sbatch) or `local`. Start at executor.py.

batch.sh is the code around a Slurm job's steps. verdict.sh decides whether a run that has ended is restarted. The batch script
quotes all texts of a recipe.
"""

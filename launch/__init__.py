"""The commands, one file each: `python launch/submit.py`. Each package imports only from those below it in this list.

    serving/                 the REST service
    api/                     the Python API, whose package is launch/api/hetstep
    sweeps/                  suites and gates; hyperparameter search
    evaluations/             evaluation of checkpoints and models, comparisons, contamination
    governance/              lineage, the registry, the verification of the audit log
    submission/              a recipe becomes a job: its checks, the needed recipes, the run folder, the start
    pages/, plan/            HTML reports; memory, times and refit of a run, and the choice of the training backend
    drawing/                 traces, and pictures of a step
    runs/                    a run as files: its folder, state, metrics, evaluations
    preflight/               checks of files, libraries, containers and the cluster before submission
    executors/               Slurm, an allocation, local processes; batch.sh and verdict.sh are what a job runs
    recipes/                 recipes and models' folders as files; recipes/nemo_rl/ translates NeMo-RL recipes
    terminal/                command lines, tables and boards

Submission imports torch for plans alone, and for checks of models on GPUs.
"""

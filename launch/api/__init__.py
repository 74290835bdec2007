"""The Python API. `launch/api/hetstep` offers it as the package `hetstep`; launch/api/README.md describes it.

    overrides     turns the keys that a caller gives into `key=value` of the command line
    submitting    submit, load, recipe
    run           what all runs have: status, metrics, rollouts, checkpoints, export, end
    training      a run that trains
    planning      plan, with its figures
    evaluating    evaluate, and an evaluation's scores
    sweeps        sweep, and its verdict
    provenance    lineage, made_from, and the registry of models
    errors        the errors of runs, beside those of `pipeline.recipe.problems`

Nothing here handles signals, changes the working directory or the environment, or ends the process. Nothing prints unless the
caller asks with `progress=True`. Only an export imports torch.
"""

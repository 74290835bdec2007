"""The Python API. `launch/api/hetstep` offers it as the package `hetstep`; launch/api/README.md describes it.

    overrides     the keys that a caller gives, as `key=value` of the command line
    submitting    submit, load, recipe
    run           what all runs have: status, metrics, rollouts, checkpoints, export, end
    training      a run that trains
    planning      plan, with its figures
    evaluating    evaluate, and an evaluation's scores
    sweeps        sweep, and its verdict
    provenance    lineage, made_from, and the registry of models
    errors        the errors above `pipeline.recipe.problems`

Nothing here prints unless the caller asks with `progress=True`, handles signals, changes the working directory or the
environment, or ends the process. Only an export imports torch.
"""

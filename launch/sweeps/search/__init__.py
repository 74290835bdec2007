"""Search a recipe's hyperparameters: the section `search` of a sweep's suite.

    config         the section's schema
    search_checks  its problems: keys, ranges, the metric, the recipe at the corners of the space, Optuna, the budget
    space          parameters as overrides: kinds, corners, grid
    price          GPU-hours of all trials, by the plan
    objective      the metric of a run, at each step and at the end
    study          Optuna's study in the sweep's folder; the only module that imports Optuna
    search_loop    submits and prunes the trials, and records their results
    trials         the trials with what their runs cost
    command        begins or continues a search, and writes its results
    search_page    the report: best values, parallel coordinates, importances, trials

The command is launch/sweep.py.
"""

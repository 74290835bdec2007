"""Search a recipe's hyperparameters: the section `search` of a sweep's suite.

    section        the section's schema and its own checks; parameters as overrides: corners, grid
    checks         problems of Optuna, the recipe at the corners of the space, the budget
    study          Optuna's study in the sweep's folder; the only module that imports Optuna
    search_report  the trials with what their runs cost, and the page that shows them
    search_loop    begins or continues a search: asks, submits, prunes, tells; writes its results

The command is launch/sweep.py.
"""

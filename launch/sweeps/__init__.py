"""Run convergence sweeps: recipes x seeds as jobs, and gates on their metrics. Search hyperparameters.

    suite          the YAML of a sweep or a search: schema and checks
    search_space   the section `search`, and the points and corners of its space
    expressions    a run's metrics, and `mean(train/reward, last=10)`: one number from them
    gates          bounds, bands and speeds of such numbers over the seeds; comparisons of scores; the baseline, a file for Git
    sweep_folder   a sweep's folder: its jobs, submissions, and each job's state
    submission     the jobs, each submitted once, as many at a time as the suite allows; the checks before
    verdict        evaluates the gates at the end, and writes Markdown, JUnit, HTML
    search_loop    runs a suite with a section `search`; alone imports Optuna
    search_report  the trials with what their runs cost, and the page that shows them

The command is launch/sweep.py; start there.
"""

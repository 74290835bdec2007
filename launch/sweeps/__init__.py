"""Convergence sweeps: recipes x seeds as jobs, and gates over what they measured. The command is launch/sweep.py.

suite        what the YAML of a sweep says, and all that is wrong with it
expressions  `mean(train/reward, last=10)`: one number of one run's metrics
gates        when such numbers, over the seeds, pass
baseline     the numbers and curves of an earlier sweep, as a file for Git
folder       a sweep's own folder: its jobs, what was submitted, what became of each
lanes        submission: as many jobs at once as the suite allows, each job once
verdict      the check at the end: retries, judgement, reports
junit, markdown, page   the reports
"""

"""Convergence sweeps: recipes x seeds as jobs, and gates over what they measured. The command is launch/sweep.py.

suite        the YAML of a sweep: schema and checks
expressions  `mean(train/reward, last=10)`: one number of one run's metrics
measured     a run's metrics as curves
gates        bounds, bands and speeds for such numbers over the seeds
baseline     the numbers and curves of an earlier sweep, as a file for Git
jobs         recipes x seeds as jobs
folder       a sweep's own folder: its jobs, what was submitted, the state of each
queue        the jobs that are under way
lanes        submission: as many jobs at once as the suite allows, each job once
verdict      the judgement at the end
texts, page  the reports: Markdown, JUnit, HTML
"""

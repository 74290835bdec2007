"""Run convergence sweeps: recipes x seeds as jobs, and gates on their metrics. The command is launch/sweep.py; start there.

    expressions   `mean(train/reward, last=10)`: one number from one run's metrics
    suite         the YAML of a sweep: schema and checks
    measurements  what gates read from run folders: curves, hardware, scores
    baseline      the numbers and curves of an earlier sweep, as a file for Git
    gates         bounds, bands and speeds of such numbers over the seeds
    sweep_folder  a sweep's folder: its jobs, submissions, and each job's state
    submission    recipes x seeds as jobs, each submitted once, as many at a time as the suite allows
    verdict       evaluates the gates at the end
    reports       Markdown, JUnit, HTML

launch/sweeps/search/ runs a suite with a section `search`.
"""

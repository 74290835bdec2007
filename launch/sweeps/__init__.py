"""Run convergence sweeps: recipes x seeds as jobs, and gates on their metrics. The command is launch/sweep.py; start there.

    suite                     the YAML of a sweep: schema and checks
    expressions               `mean(train/reward, last=10)`: one number from one run's metrics
    measurements              a run's metrics as curves, and its hardware
    gates                     bounds, bands and speeds of such numbers over the seeds
    baseline                  the numbers and curves of an earlier sweep, as a file for Git
    jobs                      recipes x seeds as jobs
    sweep_folder              a sweep's folder: its jobs, submissions, and each job's state
    queue                     the states of live jobs
    job_submission            submits each job once, as many at a time as the suite allows
    verdict                   evaluates the gates at the end
    text_reports, sweep_page  the reports: Markdown, JUnit, HTML

launch/sweeps/search/ runs a suite with a section `search`.
"""

"""The commands: submit, follow and compare runs. Start at launch/submit.py.

submit, sweep, status, report, timeline, export, plan_refit, bundle   the commands; command_line parses their `key=value`
recipes, prepare    read a recipe, and find what it needs and all its problems; preflight/ has the checks
executors/          run the ranks under Slurm, in an allocation, or on this machine
run_setup           creates and locks a run's folder; run_folder and attempts read it
plan/               predicts memory, bytes and seconds; nemo_rl/ translates NeMo-RL recipes

Nothing here imports torch before a rank starts.
"""

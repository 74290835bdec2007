"""Data sets, chat templates and packing: from the recipe's `data` to the batches of a step.

Start at `mixture.build_streams`.
"""

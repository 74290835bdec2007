"""Refit: transfer the policy's weights from the train ranks to the generate ranks.

Rank 0 plans and commits (`refit_coordinator.py`). `plan.py` makes the plan once per run from the layouts of both ends.
`planned.py` follows it on every rank, and `broadcast.py` is the simple transfer that needs no plan. `digest.py` proves that
both ends hold the same values.
"""

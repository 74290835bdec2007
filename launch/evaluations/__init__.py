"""Evaluations: what `launch/evaluate.py` and the section `evaluation` of a training recipe submit.

    evaluation_job    one evaluation, from its recipe to its scores
    follower          evaluates the checkpoints of a live run as they are completed
    overlap           questions whose text occurs in other texts

launch/runs reads their folders: scores, answers so far, and checkpoints that wait for an evaluation.
"""

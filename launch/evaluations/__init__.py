"""Evaluations: what `launch/evaluate.py` and the section `evaluation` of a training recipe submit.

suites       the recipe of an evaluation: a suite over which the run's, or the model's, own keys are laid
sources      what is evaluated: a model, or a checkpoint of a run
kept         checkpoints kept, by hard links, until they are evaluated
submission   one evaluation, from its recipe to its scores
follower     evaluates the checkpoints of a live run as they are completed
background   the follower as a process of its own
records      which checkpoints of a run are evaluated, pending or being evaluated
progress     numbers of answers so far
tables       scores for the terminal
folder       the scores and answers of complete evaluations
overlap      questions whose text occurs in other texts
comparison   two evaluations of the same questions, with verdicts of paired tests
"""

"""Evaluation of models on tasks.

    formats/       one file per family of data sets: records -> questions
    sampled.py     tasks whose answers an environment scores
    lm_eval_*.py   tasks of lm-evaluation-harness: its model, the data of a suite's tasks, and their answers
    judged.py      tasks that a judge scores: baseline_comparison.py, multi_turn_rating.py, refusal.py
    judge.py       asks the judge
    preference.py  tasks that score a reward model
    engines.py     asks the engines, on rank 0
    answers.py     keeps the answers as JSONL, so that a killed evaluation can continue
    scores.py      computes scores.json and values.json from the answers alone
    statistics.py  intervals of scores, and comparisons of two evaluations of the same questions

Start in `questions.py` and `task.py`, then `evaluation_loop.py`.
"""

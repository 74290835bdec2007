"""Evaluation of models on tasks.

    formats/       one file per family of data sets: records -> questions
    sampled.py     tasks whose answers an environment scores
    choices.py     tasks by likelihood: choices; perplexity.py has continuations and whole texts
    judged.py      tasks that a judge scores: baseline_comparison.py, multi_turn_rating.py, refusal.py; judge.py asks it
    preference.py  tasks that score a reward model
    engines.py     asks the engines, on rank 0
    answers.py     the answers so far, as JSONL, from which a killed evaluation continues
    scores.py      scores.json and values.json, from the answers alone
    statistics.py  intervals of scores, and comparisons of two evaluations of the same questions

Start in `questions.py` and `task.py`, then `evaluation_loop.py`.
"""

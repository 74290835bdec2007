"""Formats of evaluation data: one file per family, registered in FORMATS of pipeline/algorithms/evaluate.py."""

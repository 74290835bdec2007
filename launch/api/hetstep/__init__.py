"""Post-train language models on Slurm or on this machine: plan, submit, watch, evaluate, export.

    import hetstep

    print(hetstep.plan("tiny_sft"))
    run = hetstep.submit("tiny_sft", sft__max_num_steps=50, run_dir="runs/first")
    run.wait()
    run.metrics("train/loss")                       # {1: 2.31, 2: 2.05, ...}

Keys of a recipe are given as a mapping, dotted or nested, `{"sft.max_num_steps": 50}`, or as keywords with `__` for each dot.
Every error raises HetstepError, whose `problems` name key, code and message. The reference is launch/api/README.md.
"""

from launch.api.errors import NotEnded, RunFailed
from launch.api.evaluating import EvaluationRun, TaskScore, evaluate
from launch.api.planning import RunPlan, plan
from launch.api.provenance import LineageView, MadeFrom, lineage, made_from, registry
from launch.api.run import RunStatus
from launch.api.submitting import load, recipe, submit
from launch.api.sweeps import SweepRun, SweepVerdict, sweep
from launch.api.training import Run
from launch.governance.graph import LineageNode
from launch.governance.model_registry import ModelRegistry, ModelVersion
from launch.governance.search import Descendant
from launch.sweeps.search_report import Trial
from pipeline.checkpoints.checkpoint import Checkpoint
from pipeline.config import Recipe
from pipeline.recipe.problems import HetstepError, Problem, RecipeError

__all__ = [
    "Checkpoint",
    "Descendant",
    "EvaluationRun",
    "HetstepError",
    "LineageNode",
    "LineageView",
    "MadeFrom",
    "ModelRegistry",
    "ModelVersion",
    "NotEnded",
    "Problem",
    "Recipe",
    "RecipeError",
    "Run",
    "RunFailed",
    "RunPlan",
    "RunStatus",
    "SweepRun",
    "SweepVerdict",
    "TaskScore",
    "Trial",
    "evaluate",
    "lineage",
    "load",
    "made_from",
    "plan",
    "recipe",
    "registry",
    "submit",
    "sweep",
]

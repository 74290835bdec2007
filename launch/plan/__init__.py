"""The plan of a run: what it holds, moves and computes, how long that takes and whether it fits, before anything is submitted.

    lengths, flops, cut, phase      what a step works on
    train_time, generate_time       seconds of its phases
    rates                           what is assumed of programs
    step, pace                      the phases of a step, and how long they take together: in turn, or ahead
    memory, ...                     bytes of the fullest rank
    calibration, split              what an earlier run measured; other divisions of nodes or GPUs
    estimate, modes, report         all of it together, in other ways on the same GPUs, and as a table
Needs the models' config.json alone: no weights, no torch. Every figure is an estimate.
"""

from launch.plan.estimate import Plan, plan

__all__ = ["Plan", "plan"]

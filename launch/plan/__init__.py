"""The plan of a run: what it holds, moves and computes, how long that takes and whether it fits, before anything is submitted.

    estimate, modes, report             a whole plan, other ways on the same GPUs, and the table
    lengths, flops, cut, phase          sizes of the work
    train_time, generate_time, sharing  seconds of its phases; step, pace: of a step, in turn or ahead of training
    rates                               assumptions about programs
    memory, ...                         bytes of the fullest rank; advice: what to change where it does not fit
    calibration, split                  measurements of an earlier run; other divisions of nodes or GPUs
    refit, refit_layouts, refit_time    what a refit moves, and its seconds; refit_picture: a timeline
Needs the models' config.json alone: no weights, no torch. Every figure is an estimate.
"""

"""The plan of a run: what it holds, moves and computes, how long that takes and whether it fits, before anything is submitted.

    estimate, modes                     a whole plan, and other ways on the same GPUs
    report, choices                     the table, and its part about other ways
    lengths, flops, cut, phase          sizes of the work
    train_time, generate_time, sharing  seconds of its phases; step, pace: of a step, in turn or ahead of training
    memory, ...                         bytes of the fullest rank; advice: what to change where it does not fit
    calibration, split                  measurements of an earlier run; other divisions of nodes or GPUs
    refit, refit_layouts, refit_time    what a refit moves, and its seconds; refit_picture: a timeline

It needs the models' config.json alone: no weights, no torch. Every figure is an estimate. Shares of the peak that programs
attain are in `recipes/hardware/*.yaml`; other assumptions about programs stand where they are used, each with its source. A key
that makes a run faster is priced where its work is: matrix products in `train_time.Job.rate`, passes over a model in
`train_time.forward_pass` and `update`, weights that wait on the host in `train_time._swapped` and `_fetched`, refits between
ranks that share GPUs in `sharing.refit`. Measurements of a run correct all of them (`calibration`).
"""

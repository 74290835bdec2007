"""Plan a run before it is submitted: its memory, transfers, operations and durations, and whether it fits on its GPUs.

    estimate, modes                        the plan of a recipe; the same GPUs in other modes. Start at `estimate.plan`
    evaluation                             the plan of an evaluation
    plan_table, alternatives               the table for the terminal, and its lines about alternatives
    lengths, data_lengths                  assumed sequence lengths; lengths of the data on this machine
    phase                                  a phase of a step
    engine_sizes, deterministic_cost       sequences that an engine runs at once; the cost of policy.deterministic
    train_time, generate_time, shared_gpus seconds of phases on train ranks, generate ranks and shared GPUs
    step_phases, step_time                 the phases of a step, and its duration when they overlap
    memory, memory_*, activations          bytes of the fullest rank
    advice                                 changes for a recipe that does not fit
    calibration, gpu_check                 measurements of an earlier run; measurements of a GPU
    split                                  other divisions of nodes or GPUs between training and generation
    refit                                  bytes and seconds of a refit, by one rule for all models
    refit_time, refit_picture              the price of the real messages of a refit, for plan_refit.py, and its picture

A plan reads only the models' config.json: no weights, no torch. Every figure is an estimate. `recipes/hardware/*.yaml` has the
shares of peak rates that programs reach. Other assumptions are next to the code that uses them, each with its source.

The time model includes the effects of keys that make a run faster: on matrix products in `train_time.Job.rate`, on passes over
a model in `train_time.forward_pass` and `update`, on copies of weights from host memory in `train_time._reference_fetched` and
`_host_copies`, and on refits between ranks that share GPUs in `shared_gpus.refit`. Measurements of an earlier run correct all
durations (`calibration`).
"""

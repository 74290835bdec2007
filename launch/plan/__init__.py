"""Plan a run before it is submitted: its memory, transfers, operations and durations, and whether it fits on its GPUs.

    estimate, variants                     the plan of a recipe; the same GPUs in other modes. Start at `estimate.plan`
    evaluation                             the plan of an evaluation
    plan_table                             the table for the terminal
    lengths, data_lengths                  assumed sequence lengths; lengths of the data on this machine
    roofline                               rates of ranks and links, from which all seconds follow; phases of a step
    train_time, generate_time, shared_gpus seconds of phases on train ranks, generate ranks and shared GPUs
    step_time                              the phases of a step, and its duration when they overlap
    memory, rank_memory, activations       bytes of the fullest train rank; of one model on one rank; of one layer
    memory_generate                        bytes of an engine's rank, and the sequences that it runs at once
    backend_choice, recomputation          keys that a recipe leaves open
    advice                                 changes for a recipe that does not fit
    placement                              a local run on this machine's GPUs
    calibration, gpu_check                 measurements of an earlier run; measurements of a GPU
    refit                                  bytes and seconds of a refit, by one rule for all models
    refit_time                             the price of the real messages of a refit, for plan_refit.py

A plan reads only the models' config.json, which transformers describes on the meta device: no weights. Every figure is an
estimate. `recipes/hardware/*.yaml` has the shares of peak rates that programs reach. Other assumptions are next to the code
that uses them, each with its source.
Measurements of an earlier run correct all durations (`calibration`).
"""

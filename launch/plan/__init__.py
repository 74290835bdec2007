"""Plan a run before it is submitted: its memory, transfers, operations and durations, and whether it fits on its GPUs.

    estimate, modes                        the plan of a recipe; the same GPUs in other modes. Start at `estimate.plan`
    evaluation                             the plan of an evaluation
    plan_table, alternatives               the table for the terminal, and its lines about alternatives
    lengths, data_lengths                  assumed sequence lengths; lengths of the data on this machine
    phase                                  a phase of a step
    engine_sizes, deterministic_cost       sequences that an engine runs at once; the cost of policy.deterministic
    train_time, generate_time, shared_gpus seconds of phases on train ranks, generate ranks and shared GPUs
    step_phases, step_time                 the phases of a step, and its duration when they overlap
    memory, memory_*, activations          bytes of the fullest rank; rank_memory: of one model on one rank
    advice                                 changes for a recipe that does not fit
    calibration, gpu_check                 measurements of an earlier run; measurements of a GPU
    split                                  other divisions of nodes or GPUs between training and generation
    refit, refit_layouts, refit_time       the schedule of a refit, and its seconds; refit_picture draws it
    layout_tables                          tables of the boxes of tensors that ranks hold or receive
    refit_adapters, module_adapters        the tensors of a refit of only adapters: FSDP2's, Megatron-Core's

A plan reads only the models' config.json, which transformers describes on the meta device: no weights. Every figure is an estimate. `recipes/hardware/*.yaml` has the
shares of peak rates that programs reach. Other assumptions are next to the code that uses them, each with its source.

The time model includes the effects of keys that make a run faster: on matrix products in `train_time.Job.rate`, on passes over
a model in `train_time.forward_pass` and `update`, on copies of weights from host memory in `train_time._reference_fetched` and
`_host_copies`, and on refits between ranks that share GPUs in `shared_gpus.refit`. Measurements of an earlier run correct all
durations (`calibration`).
"""

"""Check a recipe against files, libraries, storage and Slurm before it is submitted.

`pipeline/config` checks what follows from the recipe alone. Each module here has `problems`, a generator of `Problem`, and none
imports torch.

    input_files, data_records    the tokenizer, and the records of data files
    architecture                 each model's config.json against the parallel layout
    evaluation_data              the data of an evaluation's tasks, and its checkpoint
    installed                    packages that some keys need, and the compiler of kernels for this machine's GPUs
    libraries, signatures        options that are handed on to vLLM, Megatron-Core, torch and transformers
    file_systems                 writable folders, the key of encrypted checkpoints; calls the next three
      model_weights              weights are complete and readable
      disk_space                 free space for checkpoints and rollouts
      container_images           images and mounts
    user_imports                  the user's own code can be imported and has the right shape
      user_source                 the same from its source alone, for code that is not trusted
    sandbox_support              programs that the policy writes can be sandboxed
    slurm_job                    Slurm accepts each component's request and can start all of them together
      slurm_request              the request of each component
      slurm_sbatch               `sbatch --test-only`, and the nodes that satisfy a request
      slurm_refusals             the recipe's keys that make Slurm refuse a request
      slurm_limits               limits of partitions, accounts and QOS that Slurm does not check at submission
    current_allocation           the allocation of this shell has enough room
"""

"""Check a recipe against files, libraries, storage and Slurm before it is submitted.

`pipeline/config` checks what follows from the recipe alone. The modules yield `Problem`s. Importing them does not import
torch.

    input_files                  calls the next ones, and checks the names of data sets
      architecture               each model's config.json against the parallel layout
      libraries, signatures      options that are handed on to vLLM, Megatron-Core, torch and transformers
      model_tokenizers           tokenizers, as model_readings has them, chat templates and vocabularies
      tool_calls                 prompts can show tools, and the parsers of calls exist
      data_files, data_records   the first records of data files, read and encoded as in the job
    evaluation_data              an evaluation's checkpoint, the data of its tasks, and tasks of lm-evaluation-harness
    installed                    packages that some keys need, the compiler of kernels, and sandboxes
    file_systems                 writable folders, the key of encrypted checkpoints, free space; calls the next two
      model_weights              weights are complete, and fit config.json
      container_images           images and mounts
    user_imports                 the user's own code can be imported and has the right shape; user_source describes it
    tried_optimizers             where a plan is made: optimizers take a step on small tensors
    slurm_job                    Slurm accepts each component's request and can start all of them together
      slurm_request              the request of each component
      slurm_cluster              partitions, nodes and `sbatch --test-only`
      slurm_limits               limits of partitions, accounts and QOS that Slurm does not check at submission
    current_allocation           the allocation of this shell has enough room
    bounded                      calls a function in a fork with limits of time and memory
"""

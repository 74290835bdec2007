"""Check a recipe before it is submitted against files, libraries, storage and Slurm; `pipeline/config` checks it by itself.

    files, records           the tokenizer's and the data's files
    architecture             the models' config.json against the layout
    libraries, signatures    options that are handed on to vLLM, Megatron-Core, torch and transformers
    storage, weights, space, containers    what is there, complete and readable; room on the disks; images and mounts
    own_code, sandbox        the user's own code is found; programs that the policy writes can be contained
    slurm                    whether Slurm takes each component's request, and would ever start them together
      slurm_request            what each component asks for
      slurm_sbatch             `sbatch --test-only`, and the nodes that would do
      slurm_refusals           why Slurm refuses a request, in keys of the recipe
      slurm_nodes, slurm_limits    limits of partitions, accounts and QOS that Slurm takes jobs beyond
    squashfuse               what a run in containers cannot save when Slurm ends it
    allocation               whether the allocation that this shell is in has room
Each has `problems`, a generator of `Problem`. Nothing here needs torch.
"""

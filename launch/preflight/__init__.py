"""Everything that can be said against a recipe before it is submitted, besides what it says against itself.

    files, records           the tokenizer's and the data's files
    architecture             the models' config.json against the layout
    libraries, signatures    options that are handed on to vLLM, Megatron-Core, torch and transformers
    storage, weights, space, containers    what is there, complete and readable; room on the disks; images and mounts
    squashfuse               what a run in containers cannot save when Slurm ends it
    slurm, slurm_*           partitions, nodes, accounts and limits, asked of Slurm
Each has `problems`, a generator of what is wrong and what would do. Nothing here needs torch.
"""

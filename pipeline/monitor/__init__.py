"""The resource monitor: samples the resources of each rank, computes metrics of each step, and warns of problems.

    readings     the catalogue: every reading with its unit, and whether it is a level or a counter
    host         a rank's process tree, its node's memory, CPU and disk
    gpu          a rank's GPU, by NVML; network: bytes of the node's NICs
    stacks       whether the main thread waits inside a collective
    sampler      a thread on each rank: takes samples, writes them to a bounded file, keeps the latest for rank 0
    operations   FLOPs of a step, from the tokens that it read and drew
    steps        rank 0: the metrics `resources/...` of a step, from the samples of all ranks
    resource_warnings, learning    warnings, a function for each kind; history has the readings that they use

A sampler never waits for the main thread, and the main thread never waits for a sampler. Samples are sent with heartbeats. If a
reading fails, it is left out, and this is logged once. If the file cannot be written, only its samples are lost.
"""

"""Translate configurations of prime-rl (https://github.com/PrimeIntellect-ai/prime-rl) into Hetstep's keys.

    reading_prime_rl        TOML files, a script with `uv run rl @ FILE`, and the command line's options become one tree
    prime_rl_defaults       prime-rl's own defaults of the keys that are translated, and the keys that several sections share
    prime_rl_translation    the order of the parts
    prime_rl_loss           the algorithm, the loss and the batches of the entry point `rl`
    tasksets                sources of tasks, and sampling
    prime_rl_training       the model, optimizers and schedules, steps, checkpoints, trackers, GPUs
    prime_rl_sft            the entry point `sft`

A key is copied, changed with a note, ignored, or a problem, as `launch/recipes/translation/rules.py` describes. The tables
follow prime-rl of August 2026. Images, sandboxes of Prime Intellect and environments of several agents are not supported.
"""

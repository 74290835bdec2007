"""Translate configurations of TRL (https://github.com/huggingface/trl) into Hetstep's keys.

    reading_trl         a script, or a YAML file, and the command line's flags become one mapping over TRL's defaults
    trl_defaults        the trainers, their fields and TRL's own defaults
    trl_translation     the order of the parts
    trl_lengths         batches, steps, epochs, validation, checkpoints
    trl_optimizers      optimizers and schedules
    trl_models          the model, its precision, adapters
    trl_data            data sets, and rewards
    sampling_trainers   GRPO and RLOO: losses, advantages, sampling
    offline_trainers    SFT, DPO and reward models

A field is copied, changed with a note, ignored, or a problem, as `launch/recipes/translation/rules.py` describes. Fields and
defaults are those of TRL 1.16 with transformers 5.19. Other trainers, images and tools are not supported.
"""

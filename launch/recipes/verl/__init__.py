"""Translate configurations of verl (https://github.com/verl-project/verl, verl/trainer/config) into Hetstep's keys.

    reading_verl        a script, or a YAML file, and the command line become one tree over verl's defaults
    hydra_overrides     Hydra's `key=value`, `+key=value`, `++key=value` and `~key`
    verl_defaults       verl's own defaults of the keys that are translated
    verl_translation    the order of the sections
    loss_and_advantages, batch_sizes, optimizers, train_engines, rollout_section, scored_files, generative_judge, critics,
    distilling, trainers, supervised
                        tables and functions of the sections

A key is copied, changed with a note, ignored, or a problem, as `launch/recipes/translation/rules.py` describes. The tables
follow verl of August 2026: `verl.trainer.main_ppo` with FSDP or Megatron-Core, and `verl.trainer.sft_trainer`. Images, sound
and video, and the engines VeOmni, TorchTitan, Automodel and Megatron-lite are not supported.
"""

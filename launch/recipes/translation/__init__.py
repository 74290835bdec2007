"""Translate recipes of other projects into Hetstep's keys: what all readers of such recipes share.

    translator      the state of a translation: leaves consumed, our layer with its origins, notes and problems
    rules           tables of rules that a section's leaves follow
    foreign_tree    from a tree in foreign keys to a translation, and from there to layers of a recipe
    leaf_types      checks that values have the types of the project's defaults
    long_options    `--name value`, as transformers' HfArgumentParser reads it
    record_counts   counts the records of a data set that is on this machine
    tracker_keys    translates a list of trackers
    shell_script    finds the arguments of a script's command without running it
    shell_words     its variables and words, with bash's expansions
    shell_grammar, shell_nodes, shell_conditions
                    parse a script; its commands and words; tests, patterns and arithmetic

A reader is an extra with a line in `launch/recipes/foreign.py` and one in `pipeline/seams/extras.py`.
"""

"""Judge the policy's turns in processes of their own: one pool of judges for each engine.

A judge is a process in which one environment judges the turns of one episode. A parent process loads all environments once, and
each judge is a fork of it, so a judge starts in milliseconds and shares the memory of the environments. If a judge dies, hangs
or sends too much, only its own episode suffers: the answer counts as wrong. If a judge dies before it has read the answer of a
first turn, another judge takes the turn.

    pool.py               the rank's side: submits calls, and repeats them if the parent process dies
    parent_process.py     the rank's side: starts the parent process, exchanges messages with it, and ends it
    parent.py             the parent process: loads the environments and forks judges
    group.py              in the parent process: the judges of one environment; chooses a judge for a turn, replaces dead ones
    judge_process.py      a judge: limits and the loop over its turns
    function_steps.py     runs a user's rollout function between two completions
    conversation_text.py  encodes and decodes its conversation
    environment_steps.py  one turn: decodes the answer, steps the environment, and encodes its observation
"""

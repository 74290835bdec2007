"""Judge the policy's turns in processes of their own: one pool of judges for each engine.

A judge is a process in which one environment takes the turns of one episode. It is a fork of a process that has loaded all
environments once, so it starts in milliseconds and shares their memory. A judge that dies, hangs or floods costs its own
episode: the answer is wrong. If a judge dies before it has read the answer of a first turn, another judge takes the turn.

    pool.py               the pool, as the engine's rank sees it: calls, and what becomes of them if the process dies
    parent_process.py     the process, as the rank sees it: its start, its messages, its end
    parent.py             the process itself: loads the environments and forks
    group.py              the judges of one environment, as that process sees them: who takes a turn; what if one dies
    judge_process.py      a judge: limits and the loop over its turns
    environment_steps.py  one turn: tokens to text, a step of the environment, its observation to tokens
"""

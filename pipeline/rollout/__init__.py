"""Sample episodes: prompts go to the engines, rewarded groups come back, until a step is full.

On rank 0:
    collectors.py           how many prompts to send, and which groups a step trains on: in turn with training, or ahead of it
    buffer.py               the groups that are under way: deadlines, ages, and what a checkpoint keeps of them
    dispatch.py             groups to engines and back
    failures.py             episodes that could not be judged, and when they end the run
Between the two:
    work.py                 requests to an engine, and its replies
On the ranks of an engine:
    driver.py               episodes on the engine: what is drawn next, what environments are asked
    episode.py              one episode
    lockstep.py             the engine's ranks make the same moves
    environment_threads.py  environments in threads: tokens to text, a step, its observation as tokens
    environment_pool.py     the threads, with a limit for each call
    environment_process.py  environments in a process of their own, as the engine's rank sees it
    environment_server.py   that process
"""

"""Sample episodes: send prompts to the engines, and collect rewarded groups until a step is full. Start with `collectors.py`.

On rank 0:
    collectors.py           choose how many prompts to send and which groups a step trains on: synchronous or asynchronous
    buffer.py               groups in progress: deadlines, ages, and their part of a checkpoint
    dispatch.py             send groups to engines and receive them
    failures.py             count episodes that could not be judged, and end the run if there are too many
Between rank 0 and the engines:
    rollout_messages.py                 requests to an engine, and its replies
On the ranks of an engine:
    driver.py               run episodes on the engine: what to draw next, which environments to call
    episode.py              the state of one episode
    lockstep.py             keep the engine's ranks in lockstep
    judges/                 judge the turns in processes of their own
"""

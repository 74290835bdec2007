"""Run episodes on an engine: draw answers, judge them, and return rewarded groups. `coordination/` is rank 0's side.

    rollout_messages.py     requests to an engine, and its replies
    driver.py               run episodes on the engine: what to draw next, which environments to call
    episode.py              the state of one episode
    engine_client.py        the engine as a user's rollout function sees it
    function_episode.py     the state of an episode that such a function plays
    function_messages.py    messages between both
    seeds.py                seeds of completions
    lockstep.py             keep the engine's ranks in lockstep
    judges                  judge the turns in processes of their own
    failures.py             count episodes that could not be judged, and end the run if there are too many

To read the code, start with `driver.py`.
"""

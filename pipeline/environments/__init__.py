"""Environments judge the policy's answers and reply to them until an episode ends.

    environment     the Environment protocol, Outcome, and the base class of built-in environments; start here
    build_environments  builds the environments of a recipe
    custom          the user's own classes and reward functions
    rewards, reward_forms    one reward function, or several rewards with weights; the forms of ours, TRL and verl
    exact_match, multiple_choice, math, dapo_math    compare the answer with the expected answer
    answer_tags     checks an answer between tags
    math_comparison     compares two expressions with math-verify
    code, code_tests    run the answer on the tests of a programming task
    llm_judge, judge_ratings, judge_prompts    score the answer with a generative judge
    reward_model    scores the answer with a reward model
    sliding_puzzle  a game of several turns
    tools, tool     episodes with tool calls; the Tool protocol, and JSON schemas of tools
    calculator, python_tool, shell_tool    built-in tools
    agent, agent_places, python_agent    episodes that a program or an async function plays
    nemo_gym        tasks of NeMo Gym's resource servers
    verifiers       tasksets of the `verifiers` package

To add one, derive from `environment.BuiltinEnvironment` and add a line to KINDS in `pipeline/config/environments.py`.
"""

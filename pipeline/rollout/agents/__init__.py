"""Let programs that speak to an OpenAI or Anthropic endpoint play episodes.

An environment with an agent (`pipeline.environments.agent`) plays its episodes itself. Each episode has its own endpoint, in
its judge: one address and one secret. What the agent asks for is drawn by the engine beside the judges, as `engine_client.py`
describes, so seeds, versions and log-probs are those of any rollout.

    agent_function.py       plays one episode: opens the endpoint, runs the agent, and returns all conversations
    agent_endpoint.py       the HTTP server of an episode: its routes, its secret and its bounds
    policy_serving.py       answers requests with vLLM's own serving classes, over the episode's engine client
    conversation_tree.py    finds the turn that a request continues, so that sampled tokens are never tokenized again
"""

"""The models of an evaluation, each on its engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.config import Recipe, engine_models, engine_ranks, evaluated_reward_model, judge_policy
from pipeline.data.chat import load_tokenizer
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.judge import Judge
from pipeline.evaluation.judge_endpoint import EndpointJudge
from pipeline.evaluation.judge_engines import EngineJudge
from pipeline.evaluation.reward_engines import RewardEngines
from pipeline.roles import GenerateRole
from pipeline.rpc import RpcGroup


def engines(
    recipe: Recipe, groups: Sequence[RpcGroup[GenerateRole]], max_num_seqs: Sequence[int], check: Callable[[], None]
) -> Engines:
    """Return the engines of the evaluated model, with the judge and the reward model beside them.

    groups: one per engine, of all models. max_num_seqs: for each engine, the number of sequences that it decodes at once.
    """
    served = list(zip(engine_models(recipe, len(groups)), groups, strict=True))
    of = {model: [group for name, group in served if name == model] for model, _ in served}
    most = max((number for (model, _), number in zip(served, max_num_seqs, strict=True) if model == "policy"), default=0)
    policy = Engines(of.get("policy", []), most, check)
    policy.judge = _judge(recipe, of.get("judge", []), check)
    if rewards := of.get("reward_model"):
        ranks = engine_ranks(recipe.policy.generation.vllm_cfg)
        policy.rewards = RewardEngines(rewards, ranks, evaluated_reward_model(recipe), check)
    return policy


def _judge(recipe: Recipe, groups: Sequence[RpcGroup[GenerateRole]], check: Callable[[], None]) -> Judge | None:
    section = recipe.evaluate.judge
    if section.env_name is not None:
        return EndpointJudge(f"env.{section.env_name}", recipe.env[section.env_name])
    if not groups:
        return None
    policy = judge_policy(recipe)
    return EngineJudge(groups, section, policy, load_tokenizer(policy.tokenizer), recipe.evaluate.seed, check)

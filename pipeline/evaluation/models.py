"""The models of an evaluation: which engines serve which, and which tasks have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.config import Recipe, engine_models, engine_ranks, evaluated_reward_model, judge_policy
from pipeline.data.chat import load_tokenizer
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.judge import Judge
from pipeline.evaluation.judge_endpoint import EndpointJudge
from pipeline.evaluation.judge_engines import EngineJudge
from pipeline.evaluation.reward_engines import RewardEngines
from pipeline.rpc import RpcGroup

NO_REWARD_MODEL = "evaluate.reward_model.model_name is null, so there is no reward model to score preferences"
NO_POLICY = "the evaluated model is a reward model, which does not generate"


def skipped(recipe: Recipe, count: int) -> dict[str, str]:
    """Return why tasks do not apply to the evaluated model, by task. count: of engines."""
    served = set(engine_models(recipe, count))
    needed = {name: "reward_model" if task.kind == "preference" else "policy" for name, task in recipe.evaluate.tasks.items()}
    why = {"reward_model": NO_REWARD_MODEL, "policy": NO_POLICY}
    return {name: why[model] for name, model in needed.items() if model not in served}


def engines(recipe: Recipe, groups: Sequence[RpcGroup], check: Callable[[], None]) -> Engines:
    """Return the engines of the evaluated model, with the judge and the reward model beside them. groups: all engines."""
    served = list(zip(engine_models(recipe, len(groups)), groups, strict=True))
    of = {model: [group for other, group in served if other == model] for model, _ in served}
    found = Engines.of(recipe, of.get("policy", []), check)
    found.judge = _judge(recipe, of.get("judge", []), check)
    if rewards := of.get("reward_model"):
        ranks = engine_ranks(recipe.policy.generation.vllm_cfg)
        found.rewards = RewardEngines(rewards, ranks, evaluated_reward_model(recipe), check)
    return found


def _judge(recipe: Recipe, groups: Sequence[RpcGroup], check: Callable[[], None]) -> Judge | None:
    section = recipe.evaluate.judge
    if section.env_name is not None:
        return EndpointJudge(f"env.{section.env_name}", recipe.env[section.env_name])
    if not groups:
        return None
    policy = judge_policy(recipe)
    return EngineJudge(groups, section, policy, load_tokenizer(policy.tokenizer), recipe.evaluate.seed, check)

"""The verbs that a train, generate, reward or judge rank serves. Rank 0 calls them through `pipeline/rpc`."""

from pipeline.roles.environment_ranks import EnvironmentRole
from pipeline.roles.generate import GenerateRole
from pipeline.roles.reward import RewardRole
from pipeline.roles.served_judge import JudgeRole
from pipeline.roles.train import TrainRole

__all__ = ["EnvironmentRole", "GenerateRole", "JudgeRole", "RewardRole", "TrainRole"]

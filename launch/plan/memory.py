"""Memory of the plan, without torch: what the fullest train rank and the fullest generate rank hold when they hold most.

    memory_train, memory_fsdp, memory_megatron    train ranks, by phase and backend
    activations, memory_head, memory_load         layers, logits, and the microbatches that pass them
    memory_generate                               weights and KV cache
    memory_advice                                 which key to change if it does not fit
`python -m tests.launch.plan memory` prints these figures beside measured ones.
"""

from launch.plan.memory_advice import advice
from launch.plan.memory_generate import generate
from launch.plan.memory_parts import GenerateMemory, TrainMemory
from launch.plan.memory_train import reward, staging, train

__all__ = ["GenerateMemory", "TrainMemory", "advice", "generate", "reward", "staging", "train"]

"""The Megatron-Core training backend.

Start with `megatron_backend`. Importing this package on a machine without CUDA makes Megatron-Core run on the CPU (`cpu`).
"""

from pipeline.train.megatron import cpu

cpu.enable()

"""The Megatron-Core training backend. On a machine without CUDA, importing this package makes Megatron-Core run on the CPU."""

from pipeline.train.megatron import cpu

cpu.enable()

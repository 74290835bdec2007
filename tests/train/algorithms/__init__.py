import pipeline.train.megatron  # noqa: F401 before any test imports megatron.core, which this makes run on the CPU

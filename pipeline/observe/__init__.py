"""Record what people want to see of a run: metrics, TensorBoard events, timelines and warnings."""

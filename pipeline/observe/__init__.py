"""Record a run for people: metrics, TensorBoard events, timelines and warnings."""

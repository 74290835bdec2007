"""What a run tells people: metrics, TensorBoard events, timelines and warnings."""

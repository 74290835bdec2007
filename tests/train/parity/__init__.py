"""The parity table: every family at every layout of both backends against Hugging Face eager in float64."""

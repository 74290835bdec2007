"""Change keys of a live run between two steps."""

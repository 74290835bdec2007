"""Read the trace events that ranks write (`rank_traces`), merge them (`merged_trace`), and draw a step (`step_picture`)."""

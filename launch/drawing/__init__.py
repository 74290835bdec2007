"""Pictures of a run or a plan as SVG, and the traces that they show. Without a library."""

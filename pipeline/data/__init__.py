"""From the recipe's `data` to what a step takes: `mixture.build_streams`."""

"""One-line faults that are planted in a copy of the product, each with the default tests that must find it."""

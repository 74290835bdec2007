"""One-line faults that are planted in a copy of the product, and the default tests that must find each of them."""

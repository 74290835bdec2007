"""What a rank asks of its machine: compilers, builds, caches, memory, network interface."""

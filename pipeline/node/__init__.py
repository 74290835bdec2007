"""Check and set up a rank's machine: compilers, builds of PyTorch, caches, memory, network interface."""

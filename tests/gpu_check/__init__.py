"""Check that Hetstep works on this machine's GPUs, and how fast, with the installed packages: `make gpu-check`."""

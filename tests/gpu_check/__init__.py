"""`make gpu-check`: whether Hetstep works on this machine's GPUs, and how fast, with whatever is installed here."""

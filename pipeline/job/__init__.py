"""Start all ranks and watch them: the world and its groups, the watchdog, the deadline, signals, the start-up record."""

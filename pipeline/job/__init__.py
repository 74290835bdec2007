"""One start of all ranks: the world and its groups, the watchdog, the deadline, signals, start-up."""

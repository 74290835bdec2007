"""From a recipe to a submitted job: the checks of all rooms, the plan, the run folder, the start."""

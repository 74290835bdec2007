"""Turn a recipe into a submitted job: check it, plan it, set up its run folder and start the job."""

"""Define what attaches to the core: extras, which the core never imports; the job's events; parts of installed packages."""

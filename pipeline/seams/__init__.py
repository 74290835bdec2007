"""The interfaces between the core and its extras: the table of extras, and the job's events. The core imports no extra."""

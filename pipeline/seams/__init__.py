"""Seams: the table of extras, and the events of a job that extras observe. The core imports no extra."""

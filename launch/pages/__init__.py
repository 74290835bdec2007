"""Build HTML pages about runs: the sections of `launch/report.py`, charts (`chart`), and the page around them (`document`)."""

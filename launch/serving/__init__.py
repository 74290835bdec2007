"""The REST service of a team: the Python API over HTTP.

`settings` reads the service's YAML file, `app` makes the application from it. Each request passes `limits` and `authentication`
before one of `routes` (reading), `changes` (submitting and ending) or `pages` (for browsers) answers it.
"""

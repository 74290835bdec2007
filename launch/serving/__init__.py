"""The REST service of a team: the Python API over HTTP.

`settings` reads the service's YAML file, and `app` makes the application from it. Each request passes `connections`,
`body_limits` and `authentication`. Then one of `routes` (reading), `changes` (submitting and ending), `sweep_routes` or `pages`
(for browsers) answers it.
"""

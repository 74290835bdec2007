"""Serve the run's authenticated rendezvous beside rank 0: torch's key-value store and the messages of `pipeline/rpc`.

Start with `client.RunStore`, a rank's connection, and `server.py`, the process behind it. `auth.py` authenticates both ends,
`relay.py` serves a node of a large world, and `gloo.py` authenticates gloo's own connections.
"""

"""Glue to modules: hooks, split models, the public ``offload()``."""

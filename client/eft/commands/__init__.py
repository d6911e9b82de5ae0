"""The verbs of `eft`: one module a group."""

"""For a test: strategies that ask for a newer torch are given this one, to see whether they need to ask."""

from importlib import metadata

_version = metadata.version
metadata.version = lambda name: "2.13.0" if name == "torch" else _version(name)

"""sm120-pipeline: from a spec to an engine image, bit for bit the same everywhere."""

__version__ = "0.1.0"

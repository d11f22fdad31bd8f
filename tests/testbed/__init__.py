"""Real parts for tests (a Docker daemon, a registry, an engine), each removing itself."""

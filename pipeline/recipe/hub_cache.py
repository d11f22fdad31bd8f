"""Weights that lie in a cache of the Hub's client, where files are links out of their folder."""

from __future__ import annotations

import re

from pipeline.recipe.launch import Launch, Mount

# A repository's folder has its name from the Hub's client, or the commit tells what it is.
_SNAPSHOT = re.compile(
    r"(?P<repository>.*/models--[^/]+(?=/snapshots/[^/])|.+(?=/snapshots/[0-9a-f]{40}(?:/|$)))"
    r"(?P<below>/snapshots/[^/]+(?:/[^/]+)*)/?"
)


def with_whole_repositories(launch: Launch) -> Launch:
    """The same launch, with all of a repository mounted where a snapshot of it was named.

    The files of a snapshot are links to ../../blobs, which the container must see too.
    """
    mounts, arguments = [], launch.arguments
    for mount in launch.mounts:
        if found := _SNAPSHOT.fullmatch(mount.host):
            mounts.append(mount.model_copy(update={"host": found["repository"]}))
            arguments = [_moved(word, mount, found["below"]) for word in arguments]
        else:
            mounts.append(mount)
    return launch.model_copy(update={"mounts": mounts, "arguments": arguments})


def _moved(word: str, mount: Mount, below: str) -> str:
    """A path inside the mount, also as a value in JSON, by its new name."""
    path = rf"(?<![\w./-]){re.escape(mount.inside)}(?![\w.-])"
    return re.sub(path, lambda _: mount.inside + below, word)

"""A `.container` file, of which Podman's generator (4.4 or newer) makes a systemd unit."""

from __future__ import annotations

import re

from pipeline.errors import RecipeInvalid
from pipeline.recipe.container import cache_of, container_name
from pipeline.recipe.launch import Launch, Mount
from pipeline.recipe.render.container import isolation, volume
from pipeline.recipe.render.quoting import continued, grouped, systemd_value, systemd_word
from pipeline.recipe.render.target import (
    NCCL_SETTINGS,
    Target,
    devices,
    drops_rights,
    mounts,
    published,
)

# The generator copies a folder into a line that has no quotes (RequiresMountsFor=).
_AWKWARD = re.compile(r"[\s\"'\\$]")


def render_quadlet(launch: Launch, target: Target) -> str:
    """The file; its name gives the unit's."""
    name = container_name(launch.recipe)
    if ";" in launch.arguments:
        # the generator writes it without quotes, and systemd begins another command there
        raise RecipeInvalid(
            f"{launch.recipe}: a quadlet cannot give the engine `;` as an argument",
            "Render it with --as systemd --runner podman.",
        )
    is_bare = drops_rights(launch)
    # only keys of Podman 4.4: later ones have keys for some of PodmanArgs
    container = [
        ("ContainerName", name),
        ("Image", target.image_for("podman")),
        *(("AddDevice", device) for device in devices(launch, target)),
        ("PublishPort", published(launch, target)),
        *([("DropCapability", "all"), ("NoNewPrivileges", "true")] if is_bare else []),
        *(("AddCapability", each) for each in launch.container.capabilities),
        *([("EnvironmentFile", NCCL_SETTINGS)] if target.nccl else []),
        *(("Environment", systemd_word(f"{k}={v}")) for k, v in launch.environment.items()),
        *(("Volume", _volume(mount)) for mount in mounts(launch, target)),
        *([("Volume", f"{cache.name}:{cache.inside}:U")] if (cache := cache_of(launch)) else []),
        *(("PodmanArgs", words[0]) for words in isolation(launch, target)),
        ("Exec", continued(grouped(launch.arguments), systemd_word)),
    ]
    return "\n".join(
        [
            f"# {name}.container: into /etc/containers/systemd, or ~/.config/containers/systemd;",
            f"# then `systemctl daemon-reload` and `systemctl start {name}`.",
            "[Unit]",
            f"Description={systemd_value(f'{launch.model} by {launch.engine}')}",
            "",
            "[Container]",
            *(f"{key}={value}" for key, value in container),
            "",
            "[Service]",
            "Restart=on-failure",
            "RestartSec=10",
            # an image of many gigabytes may have to be pulled first
            "TimeoutStartSec=infinity",
            "",
            "[Install]",
            "WantedBy=multi-user.target default.target",
            "",
        ]
    )


def _volume(mount: Mount) -> str:
    if _AWKWARD.search(mount.host):
        raise RecipeInvalid(
            f"{mount.host}: a quadlet mounts no folder with blanks, quotes, \\ or $ in its path",
            "Name the folder by another path, such as a link to it.",
        )
    return systemd_value(volume(mount, "podman"))

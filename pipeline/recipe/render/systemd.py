"""A systemd unit that runs the container with Docker or Podman."""

from __future__ import annotations

from pipeline.recipe.container import container_name
from pipeline.recipe.launch import Launch
from pipeline.recipe.render.container import run_words
from pipeline.recipe.render.quoting import continued, systemd_value, systemd_word
from pipeline.recipe.render.target import Target


def render_systemd(launch: Launch, target: Target) -> str:
    """The unit; systemd starts it again after a failure and after a reboot."""
    name, program = container_name(launch.recipe), f"/usr/bin/{target.runner}"
    words = run_words(launch, target, target.runner, ["--rm", "--name", name])
    words[0][0] = program
    after = "network-online.target" + (" docker.service" if target.runner == "docker" else "")
    return "\n".join(
        [
            f"# {name}.service: into /etc/systemd/system;",
            f"# then `systemctl daemon-reload` and `systemctl enable --now {name}`.",
            "[Unit]",
            f"Description={systemd_value(f'{launch.model} by {launch.engine}')}",
            f"After={after}",
            "Wants=network-online.target",
            *(["Requires=docker.service"] if target.runner == "docker" else []),
            "",
            "[Service]",
            # what an earlier run left behind, after a power cut, would hold the name
            f"ExecStartPre=-{program} rm --force {name}",
            f"ExecStart={continued(words, systemd_word)}",
            f"ExecStop={program} stop {name}",
            # an engine that was asked to stop did nothing wrong
            "SuccessExitStatus=143",
            "Restart=on-failure",
            "RestartSec=10",
            # an image of many gigabytes may have to be pulled first
            "TimeoutStartSec=infinity",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )

"""Write each role's README from its argument specs: `python ansible/role_readme.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent / "roles"
_MARKUP = re.compile(r"[CBIMO]\(([^)]*)\)")


# values for an example play, where the playbook has none from the lock
_EXAMPLES = {
    "nvidia_repository_url": "http://mirror.example/cuda/repos/debian12/x86_64/",
    "nvidia_repository_key": "keys/nvidia.gpg",
    "registry_name": "registry.example",
    "registry_htpasswd": "{{ vault_registry_htpasswd }}",
    "slurm_head": "gpu1.example",
    "slurm_munge_key": "{{ vault_slurm_munge_key }}",
    "weights_wheel": "dist/sm120_pipeline-0.1.0-py3-none-any.whl",
    "weights_requirements": "lockfiles/tool/run.txt",
    "weights_checkout": "{{ playbook_dir }}/..",
    "engine_order": "orders/glm.json",
    "pinned_packages_part": "nccl",
    "pinned_packages_pins": "{{ sm120_pins.nccl.debs }}",
}
# What `sm120 host verify` leaves out of a role's promises, and why.
_NOT_JUDGED = {
    "nccl": [
        "NCCL in environments of Python (`site-packages`) and in images: they bring their own.",
        "Variables that a program sets for itself, or a person in a running shell.",
    ],
    "host_tuning": [
        "Swap, unless `host_tuning_swap` is `off`: Ubuntu's installer makes a swap file.",
        "Scripts outside of the folders for boot, cron, udev and /usr/local that a unit calls.",
        "Which clocks a driver has locked: it does not say. That no card is faster now is judged.",
        "Whether chrony is synchronised: that takes minutes after its first start.",
    ],
    "container_runtime": [
        "Drop-ins of Docker's unit other than limits and flags: a proxy is set by one.",
        "Insecure registries other than the one that the inventory names.",
    ],
    "nvidia_driver": [
        "The order in which the firmware tries disks and boot loaders other than GRUB."
    ],
    "pcie": [
        "Rules of udev that packages ship in /usr/lib; what sysfs has for each card is judged.",
        "Modules that an initramfs of another kernel than the newest loads.",
    ],
    "registry": ["The layers below the first folders of its storage: clients verify digests."],
    "engine": ["What the engine answers: `sm120 smoke` and `sm120 quality` ask it."],
    "weights": ["Group permissions below the folder of the weights: a site shares them so."],
    "slurm": [
        "What sites set in /etc/slurm beside the three files of the role, and other partitions.",
        "Whether a job sees the cards that it was given and no others: that takes a job.",
    ],
    "metrics": [
        "Who else can reach the address that the exporter listens on: a firewall is the site's.",
        "Collectors that a site switches on or off in /etc/default/prometheus-node-exporter.",
    ],
    "health": ["Whether a unit of the site has the condition that keeps it from starting."],
    "nvidia_repository": ["Keys that a source names itself by Signed-By: they speak for it alone."],
}


def read_specs(role: Path, entry: str = "main") -> dict[str, Any]:
    """One entry point of a role."""
    specs: dict[str, Any] = entry_points(role)[entry]
    return specs


def entry_points(role: Path) -> dict[str, Any]:
    """Every entry point by the name of its file in tasks/."""
    text = (role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    points: dict[str, Any] = yaml.safe_load(text)["argument_specs"]
    return points


def example(role: Path) -> str:
    """A play that runs the role; values of the lock come by the variables of the playbook."""
    (play,) = yaml.safe_load((ROLES.parent / "site.yml").read_text(encoding="utf-8"))
    included = [t for t in play["tasks"] if "ansible.builtin.include_role" in t]
    own = (t for t in included if t["ansible.builtin.include_role"]["name"] == role.name)
    given = next(own, {}).get("vars", {})
    needed = [n for n, o in read_specs(role)["options"].items() if o.get("required")]
    values = {name: given.get(name, _EXAMPLES.get(name)) for name in needed}
    entry = {"role": role.name, **({"vars": values} if values else {})}
    head = {"name": f"Run {role.name}", "hosts": "gpus", "become": True}
    body = {**head, "vars_files": ["vars/site.yml"], "roles": [entry]}
    return yaml.safe_dump([body], sort_keys=False, width=200)


def readme(role: Path) -> str:
    """The text of a role's README."""
    specs = read_specs(role)
    paragraphs = [plain(text) for text in specs["description"]]
    rows = [row(name, option) for name, option in specs["options"].items()]
    lines = [
        *(f"# {role.name}", "", plain(specs["short_description"]), ""),
        *(line for paragraph in paragraphs for line in (paragraph, "")),
        *("| variable | type | default | what it is |", "|---|---|---|---|", *rows, ""),
        *usage(role.name),
        *(
            "## Example",
            "",
            "A play in the folder `ansible/` of a checkout; with the collection installed,",
        ),
        *(f"the role is `sm120.hosts.{role.name}`:", ""),
        *("```yaml", "---", example(role).rstrip(), "```", ""),
        *others(role),
        "Written by `python ansible/role_readme.py` from `meta/argument_specs.yml`.",
    ]
    return "\n".join(lines) + "\n"


def others(role: Path) -> list[str]:
    """Entry points besides main, and what is not judged."""
    points = {n: s for n, s in entry_points(role).items() if n != "main"}
    rows = [
        f"| `{name}` | {', '.join(f'`{o}`' for o in spec['options']) or 'none'} | "
        f"{plain(spec['short_description'])} |"
        for name, spec in points.items()
    ]
    table = ["| `tasks_from` | variables | what it does |", "|---|---|---|", *rows, ""]
    notes = [f"- {text}" for text in _NOT_JUDGED.get(role.name, [])]
    unjudged = ["## What `sm120 host verify` does not judge", "", *notes, ""]
    return [*(table if rows else []), *(unjudged if notes else [])]


def usage(name: str) -> list[str]:
    """How to run a role alone, where the playbook has it under a tag."""
    tagged = f"tags: [{name}]" in (ROLES.parent / "site.yml").read_text(encoding="utf-8")
    return [f"Run it alone with `--tags {name}`.", ""] if tagged else []


def row(name: str, option: dict[str, Any]) -> str:
    """One variable."""
    kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
    if "choices" in option:
        kind = " / ".join(f"`{choice}`" for choice in option["choices"])
    return f"| `{name}` | {kind} | {default_of(option)} | {plain(option['description'])} |"


def default_of(option: dict[str, Any]) -> str:
    """The value of a variable that is not set."""
    if option.get("required"):
        return "**required**"
    if "default" not in option:
        return "not set"
    value = option["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def plain(text: str) -> str:
    """Ansible's markup as Markdown, on one line."""
    return _MARKUP.sub(r"`\1`", " ".join(text.split())).replace("|", "\\|")


def roles() -> list[Path]:
    """Every role, by name."""
    return sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml"))


if __name__ == "__main__":
    for role in roles():
        (role / "README.md").write_text(readme(role), encoding="utf-8")

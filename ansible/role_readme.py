"""Write each role's README from its argument specs: `python ansible/role_readme.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent / "roles"
_MARKUP = re.compile(r"[CBIMO]\(([^)]*)\)")


def read_specs(role: Path) -> dict[str, Any]:
    """The role's only entry point."""
    text = (role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    specs: dict[str, Any] = yaml.safe_load(text)["argument_specs"]["main"]
    return specs


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
        "Written by `python ansible/role_readme.py` from `meta/argument_specs.yml`.",
    ]
    return "\n".join(lines) + "\n"


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

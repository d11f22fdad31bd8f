"""`sm120 host …` over a site, as a user runs it, and what it said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from tests.integration.site import Site
from tests.testbed.playbook import ROOT, write_inventory


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    def rows(self, host: str, *verdicts: str) -> set[str]:
        """Promises of a host that ended so, as `role: promise`."""
        found = self.host(host)["rows"]
        return {f"{r['role']}: {r['promise']}" for r in found if r["verdict"] in verdicts}

    def host(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(h for h in json.loads(self.out)["hosts"] if h["host"] == name)
        return found


def command(site: Site, *words: str, **values: Any) -> Ended:
    """`sm120 host …` over the site's inventory."""
    inventory = write_inventory(site.tmp / "inventory.json", site.fleet, {**site.values, **values})
    link = site.checkout / "ansible"
    if not link.exists():
        link.symlink_to(ROOT / "ansible")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pipeline", "--checkout", str(site.checkout), "host"),
            *(words[0], "-i", str(inventory), *words[1:]),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def verify(site: Site, *words: str, **values: Any) -> Ended:
    return command(site, "verify", "--json", *words, **values)

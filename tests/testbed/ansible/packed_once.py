"""Lets all runs of Ansible share the modules that they pack for nodes.

Each run of a playbook reads and packs a module with all that it imports when its first task needs
it: a third of a second each. Ansible finds this file as a plugin for callbacks and loads it before
the first task; nothing is called back.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


class CallbackModule:
    """No callback: it is not based on Ansible's class, so that Ansible leaves it aside."""


if "ansible.constants" in sys.modules:
    _own = Path(sys.modules["ansible.constants"].DEFAULT_LOCAL_TMP, "ansiballz_cache")
    if not _own.exists():
        _own.symlink_to(os.environ["ANSIBLE_PACKED_MODULES"])

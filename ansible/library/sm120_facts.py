#!/usr/bin/python
"""Captures a host for `sm120 host facts`, with the code that captures this machine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: sm120_facts
short_description: Read what a host is, for C(sm120 host facts).
description:
  - Reads files and runs a few programs, each with a time limit. Changes nothing, and needs nothing
    on the host but Python 3.
  - The result is not judged; write it to a file on the controller and give that to
    C(sm120 host facts --root FILE), C(sm120 host check --facts --root FILE) or
    C(sm120 host drift OLD --root FILE).
options:
  root:
    description: The root of the system to read; another than C(/) is a copied tree.
    type: path
    default: /
author: sm120-pipeline
"""

EXAMPLES = r"""
- name: Read the host
  sm120_facts:
  register: host

- name: Keep what was read
  ansible.builtin.copy:
    content: "{{ host.capture | to_nice_json }}"
    dest: "facts/{{ inventory_hostname }}.json"
    mode: "0600"
  delegate_to: localhost
"""

RETURN = r"""
capture:
  description: Files and the output of programs, as pipeline/host/facts/capture.py writes them.
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

from ansible.module_utils.sm120_capture import take  # noqa: E402


def main() -> None:
    """Capture the host."""
    module = AnsibleModule(
        argument_spec={"root": {"type": "path", "default": "/"}}, supports_check_mode=True
    )
    module.exit_json(changed=False, capture=take(module.params["root"]))


if __name__ == "__main__":
    main()

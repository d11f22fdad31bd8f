"""Where a Python environment lies inside an image."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from pipeline.assemble.entry import Entry
from pipeline.oci.record import Kind


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment over the image's own Python, e.g. 3.11 at /opt/venv."""

    version: str = "3.11"
    root: str = "opt/venv"

    @property
    def site(self) -> str:
        return f"{self.root}/lib/python{self.version}/site-packages"

    @property
    def bin(self) -> str:
        return f"{self.root}/bin"

    @property
    def python(self) -> str:
        return f"/{self.root}/bin/python"

    def scheme(self, name: str, project: str) -> str | None:
        """The folder of one of a wheel's install schemes."""
        folders = {
            "purelib": self.site,
            "platlib": self.site,
            "scripts": self.bin,
            "data": self.root,
            "headers": f"{self.root}/include/site/python{self.version}/{project}",
        }
        return folders.get(name)

    def record_path(self, path: str) -> str:
        """A path as RECORD writes it: relative to site-packages."""
        return posixpath.relpath(path, self.site)

    def skeleton(self, home: str = "/usr/bin") -> list[Entry]:
        """What `python -m venv --without-pip` would leave, without running it."""
        system = f"{home}/python{self.version}"
        config = f"home = {home}\ninclude-system-site-packages = false\nversion = {self.version}\n"
        links = {"python": system, "python3": "python", f"python{self.version}": "python"}
        return [
            Entry(f"{self.root}/pyvenv.cfg", Kind.FILE, 0o644, config.encode()),
            Entry(f"{self.root}/lib64", Kind.SYMLINK, 0o777, target="lib"),
            *(Entry(f"{self.bin}/{n}", Kind.SYMLINK, 0o777, target=t) for n, t in links.items()),
        ]

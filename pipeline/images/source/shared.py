"""Objects that machines share through a folder on an HTTP server, as ccache keeps them there.

Steps have no network, so ccache itself never asks the server. Before a build, the objects that
earlier builds of the same tree listed come to a folder that ccache reads as its remote storage;
after it, what is new goes to the server. Names are those of ccache's HTTP storage (its layout
`subdirs`), so that ccache on other machines may use the same folder.

Whoever may write to the server can write an object with a right checksum. So objects of this folder
are kept apart from a store's own, and what was compiled with them is not signed before a golden
digest or a build without them has shown the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from pipeline.core import log
from pipeline.core.errors import SpecInvalid
from pipeline.core.files import write_bytes
from pipeline.core.net.address import masked, split_address
from pipeline.core.net.client import Reply, Small, login_in
from pipeline.core.net.failures import BadAddress, NetError
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import plain_settings
from pipeline.images.assemble.plan import TreePlan
from pipeline.images.source.objects import entries

# what ccache names an entry: two characters, then the rest of its hash
_NAME = re.compile(r"[0-9a-v]{2}/[0-9a-v]{20,60}")
_MOST_OBJECTS = 100_000
_MOST_LIST_BYTES = 8 << 20
_MOST_OBJECT_BYTES = 1 << 30
_MOST_FAULTS = 3  # then the server is left alone: compiling is always possible


@dataclass
class SharedObjects:
    """A server's folder, and the folder of one build that ccache takes for its remote storage."""

    url: str
    folder: Path
    plan: TreePlan
    faults: int = 0

    def __post_init__(self) -> None:
        try:
            split_address(self.url)
        except BadAddress as error:
            raise SpecInvalid(
                f"--object-cache {masked(self.url)}: is not an http address",
                "Name the folder of a server that takes PUT: http://HOST/objects.",
            ) from error
        self._client = NetClient(plain_settings())
        self._brought: set[str] = set()
        self._listed: list[str] = []

    @property
    def _list(self) -> str:
        # by what decides most objects: a list only spares downloads, so it may be too long or short
        plan = self.plan
        parts = (plan.source.name, plan.name, plan.platform, plan.toolchain.spec.name)
        return f"lists/{quote('-'.join(parts).replace('/', '-'))}.txt"

    def bring(self, local: Path) -> None:
        """Fetch what earlier builds listed and `local`, ccache's own folder, lacks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        address = f"{self.url}/{self._list}"
        reply = self._try(partial(self._client.fetch, address, _MOST_LIST_BYTES))
        if reply is None or reply.status != 200:
            return log.say("  no shared objects of this build yet")
        names = reply.data.decode("ascii", "replace").split()[:_MOST_OBJECTS]
        # a name that is none would be written anywhere
        self._listed = [name for name in names if _NAME.fullmatch(name)]
        here = {name.replace("/", "")[:-1] for name in entries(local)}
        wanted = [name for name in self._listed if name.replace("/", "") not in here]
        for name in wanted:
            fetch = partial(self._client.fetch, f"{self.url}/{name}", _MOST_OBJECT_BYTES)
            got = self._try(fetch)
            if got is not None and got.status == 200:
                write_bytes(self.folder / name, got.data)
                self._brought.add(name)
        log.say(f"  {log.count(len(self._brought), 'shared object')} fetched, of {len(wanted)}")

    def send(self) -> None:
        """Send what ccache wrote, and the list of it; a failure costs other machines time only."""
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.glob("??/*"))
        made = sorted(name for name in found if _NAME.fullmatch(name) and name not in self._brought)
        sent = []
        for name in made:
            reply = self._try(partial(self._put, name, (self.folder / name).read_bytes()))
            if reply is not None and reply.status in (200, 201, 204):
                sent.append(name)
        if sent:
            names = [*self._listed, *(n for n in sent if n not in set(self._listed))]
            text = "".join(f"{name}\n" for name in names[-_MOST_OBJECTS:])
            # the list last: it names nothing that is not there
            self._try(partial(self._put, self._list, text.encode()))
        log.say(f"  {log.count(len(sent), 'shared object')} sent, of {len(made)}")

    def _put(self, name: str, data: bytes) -> Reply:
        url = f"{self.url}/{name}"
        login = {"Authorization": text} if (text := login_in(url)) else {}
        with self._client.ask("PUT", url, headers=login, body=Small(data)) as answer:
            return Reply(answer.status, url, answer.headers, answer.read(_MOST_LIST_BYTES))

    def _try(self, ask: Callable[[], Reply]) -> Reply | None:
        """Asks the server; none where it fails. After some failures it asks no more."""
        if self.faults >= _MOST_FAULTS:
            return None
        try:
            reply = ask()
        except NetError as error:
            why = str(error)
        else:
            if reply.status in (200, 201, 204, 404):
                return reply
            why = f"{masked(self.url)}: answers {reply.status}"
        self.faults += 1
        log.say(f"  shared objects: {why}; compiled instead")
        return None

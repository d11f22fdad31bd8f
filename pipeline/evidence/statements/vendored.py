"""Libraries that wheels carry inside, by the bills that wheels ship of them (PEP 770).

auditwheel, maturin and others write `*.dist-info/sboms/*.json` as CycloneDX or SPDX. Others write
them: an unreadable one is named, and does not prevent an image's own bill.
https://peps.python.org/pep-0770/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name

from pipeline.artifacts.attest.names import parse_purl
from pipeline.artifacts.attest.strict import plain, read_signed_json
from pipeline.artifacts.oci.record import Kind
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import RecordInvalid
from pipeline.evidence.statements.inventory import ImagePart
from pipeline.images.assemble.layer import read_layer_file

_FOLDER = ".dist-info/sboms/"
# of Rust extensions they list some hundred crates: a few hundred kilobytes
_MOST_BYTES = 8 << 20
_MOST_DEPTH = 8
_MOST_PARTS = 20_000
# https://cyclonedx.org/specification/overview/: these only add fields to one another
CYCLONEDX_READ = ("1.4", "1.5", "1.6", "1.7")


class Library(NamedTuple):
    """A library inside a wheel; many bills name it without a package URL."""

    name: str
    version: str
    purl: str = ""


@dataclass(frozen=True)
class Vendored:
    """What the bills inside one wheel list, and why others could not be read."""

    libraries: tuple[Library, ...] = ()
    unread: tuple[str, ...] = ()


NONE_INSIDE = Vendored()


def listed_components(body: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """Every component of a CycloneDX bill, nested ones too; each is an object."""
    components = body.get("components") or []
    if not isinstance(components, list) or depth > _MOST_DEPTH:
        raise RecordInvalid("bill of materials: its components are no list, or nested too deep")
    for each in components:
        if not isinstance(each, dict):
            raise RecordInvalid("bill of materials: a component is no JSON object")
        yield each
        yield from listed_components(each, depth + 1)


def vendored_in(store: Store, parts: Sequence[ImagePart]) -> dict[str, Vendored]:
    """What each wheel's own bills list, by the wheel's package URL."""
    found: dict[str, Vendored] = {}
    for layer in {x.layer.record.digest: x.layer.record for x in parts if x.is_wheel}.values():
        owners = {x.pin.name: x.purl for x in parts if x.layer.record == layer and x.is_wheel}
        # files with other suffixes are bills, too; they are listed as not read
        rows = [r for end in (".json", ".xml", ".spdx") for r in store.find_rows(layer, end)]
        for row in sorted(r for r in rows if _FOLDER in r.path and r.kind == Kind.FILE):
            purl = owners.get(row.owner)
            if purl is None:
                continue
            file = plain(row.path.rpartition("/")[2])
            named: list[tuple[Any, Any, Any]] = []
            unread = ""
            try:
                if row.size_bytes > _MOST_BYTES or not row.path.endswith(".json"):
                    raise RecordInvalid("is too large, or no JSON")
                data = read_layer_file(store.blob_path(layer.digest), row)
                body = read_signed_json(data, "the bill", _MOST_BYTES)
                if not isinstance(body, dict):
                    raise RecordInvalid("is no JSON object")
                if body.get("bomFormat") == "CycloneDX":
                    if (version := body.get("specVersion")) not in CYCLONEDX_READ:
                        raise RecordInvalid(f"is CycloneDX {version!r}")
                    listed = [x for x in listed_components(body) if x.get("type") != "file"]
                    named = [(x.get("name"), x.get("version"), x.get("purl")) for x in listed]
                elif str(body.get("spdxVersion")).startswith("SPDX-2."):
                    for package in body.get("packages") or []:
                        refs = package.get("externalRefs") or []
                        urls = [x["referenceLocator"] for x in refs if x["referenceType"] == "purl"]
                        package_id = (package.get("name"), package.get("versionInfo"))
                        named += [(*package_id, url) for url in urls] or [(*package_id, None)]
                else:
                    raise RecordInvalid("is neither CycloneDX nor SPDX 2")
            except (RecordInvalid, AttributeError, KeyError, TypeError) as error:
                unread, named = plain(f"{file}: {error}").replace("\n", " ")[:200], []
            before, fresh = found.get(purl, NONE_INSIDE), list[Library]()
            for name, version, place in named[:_MOST_PARTS]:
                url = parse_purl(place) if isinstance(place, str) else None
                # a wheel lists itself and its own modules, which are no libraries inside it
                if url and (url.kind, canonicalize_name(url.name)) == ("pypi", row.owner):
                    continue
                if url:
                    fresh.append(Library(url.name, url.version, place))
                elif isinstance(name, str) and name:
                    number = version if isinstance(version, str) else ""
                    fresh.append(Library(plain(name)[:200], plain(number)[:200]))
            found[purl] = Vendored(
                tuple(dict.fromkeys([*before.libraries, *fresh])),
                (*before.unread, *([unread] if unread else [])),
            )
    return found

"""The output of nvidia-smi: the XML of `-q -x`, and the matrices of `topo`."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.hosts.facts.model import Clocks, EccErrors, Gpu, Link, Power

# Sixteen cards make some 400 KB of XML; captures may come from anybody.
_LIMIT = 16 * 1024 * 1024
# What nvidia-smi prints where there is no value; a lost card reports "[Unknown Error]".
_NO_VALUE = re.compile(
    r"^\[?(N/A|Not (Supported|Available|Found)|Unknown Error|GPU is lost|Insufficient Permissions"
    r"|Requested functionality has been deprecated|ERR!|Function Not Found)\]?$",
    re.I,
)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# nvidia-smi underlines the head of the table, also where it writes to a pipe
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"^GPU(\d+)$")
_LINK = re.compile(r"^(X|SYS|NODE|PHB|PXB|PIX|NV\d+)$")
_PEER = re.compile(r"^(X|OK|CNS|GNS|TNS|NS|DR|U)$")


def read_smi_log(text: str) -> Known[Element]:
    """The document, if it is nvidia-smi's and complete."""
    if len(text) > _LIMIT:
        return unknown("nvidia-smi -q -x: more than 16 MiB of XML")
    # they could grow without end or name files; nvidia-smi declares none
    if "<!ENTITY" in text:
        return unknown("nvidia-smi -q -x: declares entities")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 -- without entities expat is safe
    except ElementTree.ParseError as error:
        return unknown(f"nvidia-smi -q -x: broken XML: {error}")
    if root.tag != "nvidia_smi_log":
        return unknown(f"nvidia-smi -q -x: a {root.tag} document")
    return root


def text_at(node: Element, path: str) -> Known[str]:
    """The text of an element, where it is a value."""
    element = node.find(path)
    if element is None:
        return unknown(f"nvidia-smi has no {path}")
    text = (element.text or "").strip()
    if not text or _NO_VALUE.match(text):
        return unknown(f"nvidia-smi reports {text or 'nothing'} for {path}")
    return text


def _amount(text: str) -> Known[int]:
    # 97887 MiB
    number, unit = text.split()
    return int(number) * _UNITS[unit]


def _whole(text: str) -> Known[int]:
    # widths of links are written 16x
    return int(text.split()[0].rstrip("x"), 10)


def read_gpus(text: str, capabilities: Known[dict[str, str]]) -> Known[list[Gpu]]:
    """Every card, in nvidia-smi's order."""
    root = read_smi_log(text)
    if isinstance(root, Unknown):
        return root
    cards = root.findall("gpu")
    count = then(text_at(root, "attached_gpus"), _whole)
    # a driver that loses a card while it answers leaves its element out
    if not isinstance(count, Unknown) and count != len(cards):
        return unknown(f"nvidia-smi counts {count} GPUs and describes {len(cards)}")
    return [_gpu(i, card, capabilities) for i, card in enumerate(cards)]


def read_memory_used(text: str) -> Known[list[int]]:
    """Bytes in use on each card, in order; no fact of a host, as they change all day."""
    root = read_smi_log(text)
    if isinstance(root, Unknown):
        return root
    used = [then(text_at(x, "fb_memory_usage/used"), _amount) for x in root.findall("gpu")]
    lost = next((x for x in used if isinstance(x, Unknown)), None)
    return lost or [x for x in used if not isinstance(x, Unknown)]


def read_field(text: str, path: str) -> Known[str]:
    """A field of the whole document, such as the driver's version."""
    root = read_smi_log(text)
    return root if isinstance(root, Unknown) else text_at(root, path)


def plain_address(bus_id: str) -> str:
    """Turn the driver's 00000000:C1:00.0 into the kernel's 0000:c1:00.0."""
    domain, rest = bus_id.split(":", 1)
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _gpu(index: int, card: Element, capabilities: Known[dict[str, str]]) -> Gpu:
    def text(path: str) -> Known[str]:
        return text_at(card, path)

    def whole(path: str) -> Known[int]:
        return then(text_at(card, path), _whole)

    def is_on(path: str) -> Known[bool]:
        values = {"Enabled": True, "Disabled": False, "Yes": True, "No": False}
        return then(text_at(card, path), lambda value: values[value])

    def watts(*names: str) -> Known[float]:
        # drivers have moved fields: the first that holds a value counts
        parents = ("gpu_power_readings", "power_readings")
        values = [text_at(card, f"{parent}/{name}") for parent in parents for name in names]
        first = next((v for v in values if not isinstance(v, Unknown)), values[0])
        return then(first, lambda value: float(value.split()[0]))

    # why the clocks are held down now; an idle card is not held down
    slowed_by: Known[list[str]] = unknown("nvidia-smi has no clocks_event_reasons")
    # renamed by R535
    for parent in ("clocks_throttle_reasons", "clocks_event_reasons"):
        if (node := card.find(parent)) is not None:
            active = {x.tag for x in node if (x.text or "").strip() == "Active"}
            prefix = parent.removesuffix("s") + "_"
            slowed_by = sorted({tag.removeprefix(prefix) for tag in active} - {"gpu_idle"})
    address = then(text("pci/pci_bus_id"), plain_address)
    capability = then(address, lambda place: then(capabilities, lambda table: table[place]))
    link, errors = "pci/pci_gpu_link_info", "ecc_errors"
    return Gpu(
        index=index,
        address=address,
        name=text("product_name"),
        architecture=text("product_architecture"),
        compute_capability=capability,
        uuid=text("uuid"),
        serial=text("serial"),
        vbios=text("vbios_version"),
        memory_bytes=then(text("fb_memory_usage/total"), _amount),
        bar1_bytes=then(text("bar1_memory_usage/total"), _amount),
        persistence=is_on("persistence_mode"),
        display_active=is_on("display_active"),
        mig=is_on("mig_mode/current_mig"),
        ecc=is_on("ecc_mode/current_ecc"),
        ecc_errors=EccErrors(
            uncorrectable_now=whole(f"{errors}/volatile/dram_uncorrectable"),
            uncorrectable_ever=whole(f"{errors}/aggregate/dram_uncorrectable"),
            remapped_failure=is_on("remapped_rows/remapped_row_failure"),
        ),
        recovery_action=text("gpu_recovery_action"),
        slowed_by=slowed_by,
        link=Link(
            generation=whole(f"{link}/pcie_gen/current_link_gen"),
            generation_max=whole(f"{link}/pcie_gen/max_link_gen"),
            generation_device_max=whole(f"{link}/pcie_gen/max_device_link_gen"),
            width=whole(f"{link}/link_widths/current_link_width"),
            width_max=whole(f"{link}/link_widths/max_link_width"),
            replays=whole("pci/replay_counter"),
        ),
        power=Power(
            limit_w=watts("current_power_limit", "power_limit", "enforced_power_limit"),
            default_w=watts("default_power_limit"),
            min_w=watts("min_power_limit"),
            max_w=watts("max_power_limit"),
            draw_w=watts("instant_power_draw", "power_draw", "average_power_draw"),
        ),
        clocks=Clocks(
            sm_mhz=whole("clocks/sm_clock"),
            memory_mhz=whole("clocks/mem_clock"),
            sm_max_mhz=whole("max_clocks/sm_clock"),
            memory_max_mhz=whole("max_clocks/mem_clock"),
        ),
    )


def read_matrix(text: str, *, peers: bool = False) -> Known[dict[str, str]]:
    """Map card pairs `0-1` to their entry; links must agree in both directions."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    columns = sum(bool(_NAME.match(x)) for x in next((x for x in lines if "GPU0" in x), []))
    rows: dict[int, list[str]] = {}
    for cells in lines:
        name = _NAME.match(cells[0]) if len(cells) > 1 else None
        # the head of the table also begins with GPU0, but another name follows it
        if name and not _NAME.match(cells[1]) and cells[1] not in ("CPU", "NIC0"):
            rows[int(name[1])] = cells[1:]
    if not rows:
        return unknown("nvidia-smi topo: no row of a GPU")
    if columns != len(rows):
        return unknown(f"nvidia-smi topo: {columns} columns, but {len(rows)} rows of GPUs")
    allowed = _PEER if peers else _LINK
    matrix: dict[str, str] = {}
    for a, row in rows.items():
        cells = row[: len(rows)]
        if len(cells) < len(rows) or not all(allowed.match(c) for c in cells):
            return unknown(f"nvidia-smi topo: the row of GPU{a} cannot be read: {' '.join(row)}")
        for b, cell in zip(rows, cells, strict=True):
            if (cell == "X") != (a == b):
                return unknown(f"nvidia-smi topo: {cell} between GPU{a} and GPU{b}")
            if a != b:
                matrix[f"{a}-{b}"] = cell
    uneven = [k for k in matrix if matrix[k] != matrix["-".join(reversed(k.split("-")))]]
    # peer access may differ by direction, a distance may not
    if uneven and not peers:
        return unknown(f"nvidia-smi topo: {uneven[0]} differs between its two directions")
    return matrix

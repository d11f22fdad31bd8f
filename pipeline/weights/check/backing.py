"""Who vouches for the lock by which a folder is judged.

The lock beside the files is there for machines without a checkout. But whoever can change a file
can change that lock too, and seal it again. So a checkout's lock goes before it: where the two
disagree nothing is judged, and where only the lock beside the files knows the set, a line warns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pipeline.core.errors import LocksDisagree, LockStale
from pipeline.core.model import Frozen
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.disk.survey import some
from pipeline.weights.model import WeightsLock, lock_path, read_lock
from pipeline.weights.place import Place


class Backing(Frozen):
    """Where the lock of a judgement came from, and who vouches for it."""

    lock_from: Literal["beside", "checkout", "given"] = "beside"
    vouched_by: str = ""
    recorded_by: str = ""  # who signed a record of an earlier judgement by this lock

    def sentence(self) -> str:
        """For people."""
        if self.lock_from == "given":
            return "judged by the lock that --lock names"
        if self.lock_from == "checkout":
            return "judged by the checkout's lock"
        if self.vouched_by:
            return f"judged by the lock beside the files, vouched for by {self.vouched_by}"
        sentence = "judged by the lock beside the files, which nothing vouches for"
        if self.recorded_by:
            return f"{sentence}; it is the one of the record that {self.recorded_by} signed"
        return sentence


def checkout_backing(place: Place, checkout: Checkout | None) -> Backing:
    """Compare the lock beside the files with the checkout's; raises where they disagree."""
    if checkout is None:
        return Backing()
    # a cache that the Hub's own client made has no lock beside it
    if not place.lock_file.is_file():
        return Backing(lock_from="checkout", vouched_by="the checkout")
    own, lock = lock_path(checkout, place.lock.name), place.lock
    for path in sorted(own.parent.glob("*.lock.yaml")):
        # a forged lock may have another name, so all locks of its commit are compared
        if path != own and lock.commit in path.read_text(encoding="utf-8", errors="replace"):
            _require_no_contradiction(place, path, read_lock(path))
    if not own.is_file():
        return Backing()
    known = read_lock(own)
    _require_no_contradiction(place, own, known)
    difference = ""
    if (lock.repository, lock.commit) != (known.repository, known.commit):
        difference = f"{lock.repository} at {lock.commit}, {known.repository} at {known.commit}"
    elif lock.files != known.files:
        apart = {pin.path for pin in lock.files} ^ {pin.path for pin in known.files}
        difference = f"only one of them has {some(sorted(apart))}"
    if difference:
        raise LockStale(
            f"{place.lock_file} and the checkout's {own.name} are of different sets: {difference}",
            f"`sm120 weights fetch {known.name}` brings the checkout's set; `--lock FILE` chooses"
            " which of the two locks judges.",
        )
    return Backing(vouched_by="the checkout")


def _require_no_contradiction(place: Place, path: Path, known: WeightsLock) -> None:
    """One commit has one content: two locks of it that differ cannot both be right."""
    lock, pins = place.lock, {pin.path: pin for pin in known.files}
    if (lock.repository, lock.commit) != (known.repository, known.commit):
        return
    # files that only one of them has are no contradiction: two specs may choose differently
    if differing := [pin.path for pin in lock.files if pins.get(pin.path, pin) != pin]:
        raise LocksDisagree(
            f"{place.lock_file} contradicts the checkout's {path.name} about {some(differing)}",
            f"One of them was changed, so nothing was judged. `--lock {path}` takes the latter.",
        )

"""The program, the locked sets and their nightly scrub."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.core.errors import WeightsDamaged, WeightsUnknown
from pipeline.hosts.fleet.promised import WeightsPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

# Lists files of the tool's environment that are not as installed: ours by the wheel, others by
# the RECORD that pip wrote, and what no package brought.
CHANGED = r"""
import base64, csv, glob, hashlib, json, os, sys, zipfile
home, wheel = sys.argv[1:]
def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
def bytes_of(path):
    try: return open(path, "rb").read()
    except OSError: return None
wrong = []
for site in glob.glob(home + "/venv/lib/python*/site-packages"):
    want = {}
    for record in glob.glob(site + "/*.dist-info/RECORD"):
        for name, sign, _ in csv.reader(open(record, newline="")):
            want[os.path.normpath(os.path.join(site, name))] = sign.partition("=")[2]
    with zipfile.ZipFile(os.path.join(home, wheel)) as archive:
        for name in archive.namelist():
            if ".dist-info/" not in name and not name.endswith("/"):
                want[os.path.join(site, name)] = digest(archive.read(name))
    for path, sign in want.items():
        data = bytes_of(path)
        if data is None and "__pycache__" not in path: wrong.append(path + " is missing")
        elif data is not None and sign and digest(data) != sign: wrong.append(path + " was changed")
    for place, folders, files in os.walk(site):
        folders[:] = [f for f in folders if f != "__pycache__"]
        more = [os.path.join(place, f) for f in files]
        # pip and setuptools of the environment itself have a RECORD too
        wrong += [p + " is of no package" for p in more if p not in want]
print(json.dumps(sorted(wrong)))
"""
# exit codes of `sm120 weights verify`, which on the host is the controller's own version
_DAMAGED = (WeightsDamaged.exit_code, WeightsUnknown.exit_code)


def test_the_program_is_the_controllers_wheel_and_runs(host: Host, wanted: WeightsPromise) -> None:
    """Installed from hashes only."""
    wheel = Path(wanted.wheel)
    checks.require_same_file(host, f"{wanted.home}/{wheel.name}", wheel)
    checks.require_same_file(host, f"{wanted.home}/requirements.txt", Path(wanted.requirements))
    done = host.run(f"{wanted.command} --version")
    require(done.rc == 0, f"{wanted.command} does not run: {done.stderr.strip()[-100:]}")


def test_the_installed_program_is_as_the_wheel_brought_it(
    host: Host, wanted: WeightsPromise
) -> None:
    """It decides what damaged weights are, and root runs it each night."""
    wheel = Path(wanted.wheel).name
    # by the system's own Python: that of the environment is what is judged
    command = "python3 -I -c %s %s %s"
    why = "its files cannot be compared"
    output = checks.output_of(host, why, command, CHANGED, wanted.home, wheel)
    fix = f"Find out who changed it; then rm -r {wanted.home}/venv and run the playbook."
    require_none(json.loads(output), "not as installed", fix)


def test_nobody_else_can_change_the_weights(host: Host, wanted: WeightsPromise) -> None:
    """Their folder and the sets in it."""
    form = f"find {wanted.root} -maxdepth 2 -perm -0002 ! -type l"
    fix = f"chmod -R o-w {wanted.root}, then `sm120 weights verify DIR --full` reads every byte."
    require_none(host.run(form).stdout.split(), "writable by everybody", fix)


def test_the_locks_on_the_host_are_the_controllers(host: Host, wanted: WeightsPromise) -> None:
    """Bytes are judged by them."""
    skip_unless(wanted.sets, "the host is to have no sets")
    for name in wanted.sets:
        path = f"{wanted.home}/checkout/lockfiles/weights/{name}.lock.yaml"
        checks.require_same_file(host, path, Path(wanted.locks) / f"{name}.lock.yaml")


def test_every_set_is_what_its_lock_says(host: Host, wanted: WeightsPromise) -> None:
    """By the program itself, which skips files that have not changed since their hash."""
    skip_unless(wanted.sets, "the host is to have no sets")
    damaged = []
    for name in wanted.sets:
        command = f"{wanted.command} --checkout {wanted.home}/checkout"
        done = host.run(f"{command} weights verify {wanted.root}/{name}")
        if done.rc in _DAMAGED:
            lines = done.stderr.strip().splitlines()
            # progress comes first; the error names the file
            error = next((line for line in lines if line.startswith("sm120: ")), lines[-1])
            damaged.append(f"{name} ({error.removeprefix('sm120: ')})")
        elif done.rc != 0:
            raise checks.Broken(f"{name}: verify ended with {done.rc}: {done.stderr.strip()[:200]}")
    fix = "Run the playbook again, or `sm120 weights verify DIR --repair` on the host."
    require_none(damaged, "damaged", fix)


def test_a_part_is_read_again_each_night(host: Host, wanted: WeightsPromise) -> None:
    """The timer is set, and the last scrub found no damage."""
    skip_unless(wanted.sets, "the host is to have no sets")
    checks.require_unit(host, "sm120-scrub.timer")
    for name in ("sm120-scrub.timer", "sm120-scrub.service"):
        checks.require_untouched_unit(host, name)
    timer = checks.text_of(host, "/etc/systemd/system/sm120-scrub.timer")
    require(f"OnCalendar={wanted.scrub_at}" in timer, "the timer waits for another moment")
    service = checks.text_of(host, "/etc/systemd/system/sm120-scrub.service")
    for name in wanted.sets:
        require(f"{wanted.root}/{name}" in service.split(), f"the scrub leaves {name} out")
    days = f"--every-days {wanted.scrub_days}"
    require(days in service, f"the scrub does not have `{days}`")
    last = host.run("systemctl show sm120-scrub.service --property=Result --value").stdout.strip()
    fix = "journalctl -u sm120-scrub names the file; `sm120 weights verify DIR --repair`."
    require(last == "success", f"the last scrub ended with {last}", fix)


def test_the_disk_is_mounted(host: Host, wanted: WeightsPromise) -> None:
    """Where one is named."""
    skip_unless(wanted.device, "no disk is named")
    require(host.mount_point(wanted.root).exists, f"nothing is mounted at {wanted.root}")

"""Settings of the bus, by the host's profile: written, booted with, and in effect."""

from __future__ import annotations

import re

from pipeline.core.known import Unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import PciePromise
from pipeline.hosts.promises import boot, checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

_MODPROBE = "/etc/modprobe.d/sm120-pcie.conf"
_MIB = 1 << 20
# a kernel's initramfs may load the driver before the disk is mounted, with settings of its own
_INITRAMFS = "ls -v /boot | sed -n 's,^initrd.img-,/boot/initrd.img-,p' | tail -n 1"
_POWER = re.compile(r"power/control\}?\s*=\s*[\"']?auto")
# of display controllers by NVIDIA: what sysfs has now
_POWER_NOW = (
    "for d in /sys/bus/pci/devices/*; do"
    ' case "$(cat $d/vendor 2>/dev/null) $(cat $d/class 2>/dev/null)" in "0x10de 0x03"*)'
    ' echo "${d##*/} $(cat $d/power/control)";; esac; done'
)
_LATER = "{} is read after ours and overrides it: change or remove it, then update-grub and reboot."


def test_the_kernel_was_booted_with_its_arguments(host: Host, wanted: PciePromise) -> None:
    """What is set in GRUB counts only after a boot."""
    lost = boot.without_effect(wanted.cmdline, checks.kernel_arguments(host))
    fix = "Reboot; if it stays so, the boot loader does not read /etc/default/grub.d."
    require_none(lost, "booted without", (_later(host, wanted) or fix) if lost else "")


def _later(host: Host, wanted: PciePromise) -> str:
    """The fix for a file after ours that overrides the arguments."""
    later = boot.overriding_file(boot.grub_arguments(host), wanted.cmdline)
    return _LATER.format(later) if later else ""


def test_the_next_boot_has_its_arguments_too(host: Host, wanted: PciePromise) -> None:
    """By GRUB's generated file, not only ours."""
    if not wanted.cmdline:
        return checks.require_gone(host, [boot.GRUB])
    written = " ".join(checks.text_of(host, boot.GRUB).split('"')[1::2]).split()
    require_none([w for w in wanted.cmdline if w not in written], f"{boot.GRUB} lacks")
    made = host.run("grep -E '^[[:space:]]*linux' /boot/grub/grub.cfg")
    why = "/boot/grub/grub.cfg names no kernel: does another loader boot this host?"
    checks.undecided_unless(made.rc == 0, why)
    # entries for recovery leave out GRUB_CMDLINE_LINUX_DEFAULT on purpose
    normal = [x for x in made.stdout.splitlines() if "recovery" not in x and " single" not in x]
    lost = {w for x in normal for w in boot.without_effect(wanted.cmdline, x.split())}
    fix = (_later(host, wanted) or "update-grub, then reboot.") if lost else ""
    require_none(sorted(lost), "/boot/grub/grub.cfg boots without", fix)


def test_no_other_file_of_grub_overrides_its_arguments(host: Host, wanted: PciePromise) -> None:
    """The next update of a kernel makes GRUB's file again, from all settings in their order."""
    skip_unless(wanted.cmdline, "the profile sets no arguments")
    rows = boot.grub_arguments(host)
    checks.undecided_unless(rows, "GRUB's settings cannot be read")
    later = boot.overriding_file(rows, wanted.cmdline)
    lost = boot.without_effect(wanted.cmdline, rows[-1][1])
    fix = _LATER.format(later) if later else ""
    require_none(lost, f"{later or boot.GRUB} leaves the next update of GRUB without", fix)


def test_the_mitigations_are_on(host: Host) -> None:
    """Turning them off gains little and leaves the machine open to attacks."""
    fix = "Take mitigations=off out of the boot loader's settings."
    bad = [w for w in checks.kernel_arguments(host) if w == "mitigations=off"]
    require_none(bad, "booted with", fix)
    files = [path for path, words in boot.grub_arguments(host) if "mitigations=off" in words]
    require_none(files[:1], "the next update of GRUB boots with mitigations=off, by", fix)


@checks.known_by("IOMMU")
def test_the_iommu_does_not_translate(facts: HostFacts, wanted: PciePromise) -> None:
    """A translating IOMMU with ACS hangs the first all_reduce (vllm-project/vllm#33041)."""
    skip_unless(wanted.iommu != "keep", "the profile leaves the IOMMU alone")
    mode = checks.known(facts.pci.iommu)
    allowed = ("off",) if wanted.iommu == "off" else ("off", "passthrough")
    fix = "Reboot; then look for other iommu arguments in /proc/cmdline."
    require(mode in allowed, f"it is {mode}", fix)


@checks.known_by("ASPM")
def test_links_are_kept_awake(facts: HostFacts, wanted: PciePromise) -> None:
    """Some boards lose a link that changes its speed (local-inference-lab/rtx6kpro)."""
    skip_unless(wanted.aspm_off, "the profile leaves ASPM alone")
    line = checks.known(facts.kernel.command_line)
    require("pcie_aspm=off" in line.split(), "the kernel was booted without pcie_aspm=off")


def test_no_rule_lets_the_cards_sleep(host: Host, wanted: PciePromise) -> None:
    """Runtime power management suspends an idle card and its link; udev's rules switch it on."""
    skip_unless(wanted.aspm_off, "the profile leaves ASPM alone")
    states = [x.split() for x in host.run(_POWER_NOW).stdout.splitlines()]
    wrong = [f"{x[0]} is set to auto" for x in states if x[1:] == ["auto"]]
    # the driver's own runtime power management (its README, chapter 22)
    wrong += [
        f"{line.path} has NVreg_DynamicPowerManagement={value}"
        for line in boot.module_settings(host)
        if line.module == "nvidia" and line.command == "options"
        if (value := line.options.get("NVreg_DynamicPowerManagement", "0")) not in ("0", "0x00")
    ]
    paths = [f"{p}/udev/rules.d/*.rules" for p in ("/etc", "/run", "/usr/local/lib")]
    wrong += [
        f"{path} sets it"
        for path, text in checks.texts_in(host, *paths).items()
        for line in text.replace("\\\n", " ").splitlines()
        if not line.lstrip().startswith("#") and _POWER.search(line)
        # for these cards, or for every device of the bus
        if "10de" in line.lower() or "vendor" not in line
    ]
    fix = "Take it out; then `udevadm control --reload`, `udevadm trigger` or reboot."
    require_none(wrong, "idle cards may sleep", fix)


def test_the_modules_options_are_written(host: Host, wanted: PciePromise) -> None:
    """In a file of our own."""
    if not wanted.module_lines:
        return checks.require_gone(host, [_MODPROBE])
    head = "# Written by the role pcie; pcie_state=absent removes it."
    checks.require_text(host, _MODPROBE, "\n".join([head, *wanted.module_lines]))


def test_no_other_file_sets_the_modules_options(host: Host, wanted: PciePromise) -> None:
    """Of two files that set one option, their names decide."""
    skip_unless(wanted.module_lines, "the profile sets no options")
    rows = boot.grub_arguments(host)
    # each option of the next update of GRUB, by the first file that has it
    first = {word: path for path, words in reversed(rows) for word in words if word in rows[-1][1]}
    options = [line for word, path in first.items() for line in boot.kernel_options(path, [word])]
    wrong = boot.other_values(
        [*boot.module_settings(host), *options], wanted.module_lines, _MODPROBE
    )
    fix = (
        f"Take the option out of that file: {_MODPROBE} sets it. Then update-initramfs -u, reboot."
    )
    require_none(wrong, "set otherwise", fix)


def test_the_initramfs_has_the_same_options(host: Host, wanted: PciePromise) -> None:
    """It keeps modprobe's files as they were at its creation."""
    skip_unless(wanted.module_lines, "the profile sets no options")
    path = host.run(_INITRAMFS).stdout.strip()
    skip_unless(path, "there is no initramfs in /boot")
    done = host.run("python3 -c %s %s", boot.READ_INITRAMFS, path)
    texts = dict(x.partition("\n")[::2] for x in done.stdout.split("\x1e") if x)
    whole = done.rc == 0 and "end" in texts
    checks.undecided_unless(whole, f"{path} cannot be read: {done.stderr.strip()[-100:]}")
    files = {p: text for p, text in texts.items() if p.startswith("/")}
    lines = [line for p, text in files.items() for line in boot.parse_lines(f"{path}:{p}", text)]
    wrong = boot.other_values(lines, wanted.module_lines, _MODPROBE)
    if "driver" in texts and not any(line.path.endswith(_MODPROBE) for line in lines):
        wrong.append(f"{path} has the driver and not {_MODPROBE}")
    fix = "Look for other files in /etc/initramfs-tools; then update-initramfs -u -k all, reboot."
    require_none(wrong, "before the disk is mounted", fix)


@checks.known_by("HMM")
def test_hmm_is_off_in_the_loaded_module(facts: HostFacts, wanted: PciePromise) -> None:
    """An option counts only for a module that was loaded after it."""
    skip_unless(wanted.hmm_off, "the profile leaves HMM alone")
    loaded = facts.pci.gpus or not isinstance(facts.driver.hmm_disabled, Unknown)
    skip_unless(loaded, "no GPU is on the bus, so nvidia_uvm is not loaded")
    require(facts.driver.hmm_disabled, "nvidia_uvm runs with HMM", "Reboot the host.")


def test_the_driver_was_loaded_with_its_registry_keys(
    facts: HostFacts, wanted: PciePromise
) -> None:
    """From the driver itself: sysfs shows the keys empty even where they are set."""
    skip_unless(wanted.p2p_keys, "the profile sets no keys")
    have = {f"{name}={value}" for name, value in checks.known(facts.driver.registry).items()}
    fix = "Reboot; if it stays so, another file in /etc/modprobe.d sets NVreg_RegistryDwords."
    require_none([k for k in wanted.p2p_keys.split(";") if k not in have], "loaded without", fix)


def test_acs_is_switched_off_at_each_boot(host: Host, wanted: PciePromise) -> None:
    """By our unit and our program, as they were shipped."""
    program, unit = "/usr/local/sbin/sm120-acs", "/etc/systemd/system/sm120-acs.service"
    if not wanted.acs_off:
        return checks.require_gone(host, [program, unit])
    checks.require_unit(host, "sm120-acs")
    checks.require_same_file(host, program, boot.ROLE_FILES / "sm120-acs")
    checks.require_same_file(host, unit, boot.ROLE_FILES / "sm120-acs.service")
    checks.require_untouched_unit(host, "sm120-acs.service")


@checks.known_by("ACS")
def test_no_bridge_above_a_card_redirects(facts: HostFacts, wanted: PciePromise) -> None:
    """From the bridges' own registers."""
    skip_unless(wanted.acs_off, "the profile leaves ACS alone")
    skip_unless(facts.pci.gpus, "no GPU is on the bus of this host")
    on = [b.address for b in facts.pci.bridges if b.acs_redirect is True]
    require_none(on, "ACS is on", "systemctl restart sm120-acs; then the firmware's setup.")
    checks.require_known(b.acs_redirect for b in facts.pci.bridges)


@checks.known_by("BAR1")
def test_every_card_has_a_window_as_large_as_asked_for(
    facts: HostFacts, wanted: PciePromise
) -> None:
    """Peers reach all of a card's memory only through it."""
    skip_unless(wanted.bar1_mib, "pcie_require_bar1 is not set")
    checks.undecided_unless(facts.pci.gpus, "no GPU is on the bus of this host")
    sizes = {g.address: g.bar1_bytes for g in facts.pci.gpus}
    checks.require_known(sizes.values())
    small = [
        f"{a} has {s // _MIB} MiB"
        for a, s in sizes.items()
        if isinstance(s, int) and s < wanted.bar1_mib * _MIB
    ]
    fix = "Switch on Above 4G Decoding and Resizable BAR in the firmware's setup."
    require_none(small, f"{wanted.bar1_mib} MiB are needed", fix)


def test_the_firmware_has_the_version_of_the_inventory(
    facts: HostFacts, wanted: PciePromise
) -> None:
    """Its defaults for ReBAR, Above 4G and ACS change with it."""
    skip_unless(wanted.bios, "pcie_bios_version is not set")
    found = checks.known(facts.bios)
    fix = "Update the firmware, look at its settings again, then name its version in the inventory."
    require(found == wanted.bios, f"the firmware has {found}, not {wanted.bios}", fix)


def test_the_probes_before_the_first_change_are_kept(host: Host) -> None:
    """The state that the role found, to compare with."""
    path = "/var/lib/sm120/pcie/before.txt"
    require("cmdline:" in checks.text_of(host, path), f"{path} is incomplete")


def test_the_probes_after_the_last_change_are_kept(host: Host) -> None:
    """The state after the role."""
    path = "/var/lib/sm120/pcie/after.txt"
    require("cmdline:" in checks.text_of(host, path), f"{path} is incomplete")

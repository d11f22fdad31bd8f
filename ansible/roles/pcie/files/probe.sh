#!/bin/sh
# One line for each setting: name, then its value now. KEEP=before|after also writes it below
# /var/lib/sm120/pcie; what was before the first run is never written over.
set -u
umask 022

look() {
    arguments=$(tr ' ' '\n' </proc/cmdline | grep -E '^(iommu|amd_iommu|intel_iommu|pcie_aspm|pcie_port_pm)=' | tr '\n' ' ')
    echo "cmdline: ${arguments:-none}"
    echo "iommu_groups: $(ls /sys/kernel/iommu_groups 2>/dev/null | wc -l)"
    echo "aspm_policy: $(cat /sys/module/pcie_aspm/parameters/policy 2>/dev/null || echo unknown)"
    echo "uvm_disable_hmm: $(cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm 2>/dev/null || echo unknown)"
    # /sys/module/nvidia/parameters/NVreg_RegistryDwords reads empty even where the keys are set
    # (noonghunna/club-3090#885)
    echo "registry_keys: $(sed -n 's/^RegistryDwords: //p' /proc/driver/nvidia/params 2>/dev/null || echo unknown)"
    for gpu in /sys/bus/pci/devices/*; do
        [ "$(cat "$gpu/vendor" 2>/dev/null)" = 0x10de ] || continue
        case "$(cat "$gpu/class")" in 0x03*) ;; *) continue ;; esac
        bytes=$(stat -c %s "$gpu/resource1" 2>/dev/null || echo 0)
        echo "bar1_mib: ${gpu##*/} $((bytes / 1048576))"
        link="$(cat "$gpu/current_link_speed" 2>/dev/null) x$(cat "$gpu/current_link_width" 2>/dev/null)"
        echo "link: ${gpu##*/} $link"
        bridge=$(dirname "$(readlink -f "$gpu")")
        while [ -e "$bridge/vendor" ]; do
            control=$(setpci -s "${bridge##*/}" ECAP_ACS+6.w 2>/dev/null || echo none)
            echo "acs: ${bridge##*/} $control"
            bridge=$(dirname "$bridge")
        done
    done
}

seen=$(look)
printf '%s\n' "$seen"
file=/var/lib/sm120/pcie/${KEEP:-}.txt
if [ -z "${KEEP:-}" ] || { [ "$KEEP" = before ] && [ -e "$file" ]; }; then
    exit 0
fi
[ "$seen" != "$(cat "$file" 2>/dev/null)" ] || exit 0
mkdir -p "${file%/*}"
printf '%s\n' "$seen" >"$file" && echo "kept $file"

#!/bin/sh
# cpu_and_gpus.sh [ROOT]: the processor's vendor and family, then how many GPUs of NVIDIA's are on the bus. Reads only.
# By the bus: on a fresh host the driver is loaded only after the reboot that comes at the end of a run.
awk -F': *' '/^vendor_id/ {maker=$2} /^cpu family/ {print maker, $2; exit}' "${1:-}/proc/cpuinfo"
count=0
for card in "${1:-}"/sys/bus/pci/devices/*; do
    [ "$(cat "$card/vendor" 2>/dev/null)" = 0x10de ] || continue
    # display controllers; neither virtual functions nor those that a guest has
    case $(cat "$card/class") in 0x03*) ;; *) continue ;; esac
    [ ! -e "$card/physfn" ] || continue
    [ "$(basename "$(readlink "$card/driver" 2>/dev/null)")" != vfio-pci ] || continue
    count=$((count + 1))
done
echo "$count"

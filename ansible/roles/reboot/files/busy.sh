#!/bin/sh
# What works on the GPUs: a line for each process that has a card open, and for each container of Docker that
# was given cards and runs. Reads only, and asks the kernel rather than the driver, which may hang.
set -u
find /proc/[0-9]*/fd -maxdepth 1 \( -lname '/dev/nvidia[0-9]*' -o -lname '/dev/nvidia-uvm*' \) 2>/dev/null |
    cut -d/ -f3 | sort -un | while read -r pid; do
    name=$(cat "/proc/$pid/comm" 2>/dev/null) || continue
    # these watch cards or keep them awake, and lose nothing
    case "$name" in
    nvidia-persiste* | nvidia-smi | nv-hostengine | nv-fabricmanage* | nvidia-powerd) continue ;;
    dcgm-exporter | nvtop | nvidia-device-p*) continue ;;
    esac
    where=
    ! grep -q docker "/proc/$pid/cgroup" 2>/dev/null || where=' in Docker'
    echo "process $pid ($name)$where"
done
command -v docker >/dev/null || exit 0
form='{{json .HostConfig.DeviceRequests}} {{json .HostConfig.Devices}} {{.HostConfig.Runtime}}|{{.Name}}'
running=$(timeout 20 docker ps --quiet 2>/dev/null) || exit 0
[ -z "$running" ] || timeout 20 docker inspect --format "$form" $running 2>/dev/null |
    awk -F'|' '$1 ~ /"gpu"|nvidia/ {sub("^/", "", $2); print "container " $2 ($1 ~ /"Driver":"cdi"/ ? " by CDI" : "")}'
exit 0

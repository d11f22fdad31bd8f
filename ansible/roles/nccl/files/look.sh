#!/bin/sh
# The processor's maker and family, then how many GPUs the driver has. Reads only.
awk -F': *' '/^vendor_id/ {maker=$2} /^cpu family/ {print maker, $2; exit}' /proc/cpuinfo
find /proc/driver/nvidia/gpus -mindepth 1 -maxdepth 1 2>/dev/null | wc -l

#!/bin/sh
# What the next boot would miss (grub, initramfs), then the reasons for a pending reboot. Reads only.
# By file times: an interrupted run leaves no other sign that it has written a file.
newer() { # newer THAN FILE...
    than=$1
    shift
    [ -n "$(find "$@" -maxdepth 0 -newer "$than" 2>/dev/null)" ]
}
if newer /boot/grub/grub.cfg /etc/default/grub.d /etc/default/grub.d/60-sm120.cfg; then
    echo "stale grub"
fi
initrd=/boot/initrd.img-$(uname -r)
if [ -e "$initrd" ] && command -v update-initramfs >/dev/null &&
    newer "$initrd" /etc/modprobe.d /etc/modprobe.d/sm120-*.conf; then
    echo "stale initramfs"
fi
find /run/sm120/reboot -type f -printf 'for %f\n' 2>/dev/null
exit 0

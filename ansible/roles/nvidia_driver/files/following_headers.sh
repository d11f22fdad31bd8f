#!/bin/sh
# The headers that follow updates as the kernel does: for linux-image-generic, linux-headers-generic.
# Without them the next kernel comes without a module, and the host boots without its GPUs. Reads only.
dpkg-query --show --showformat '${Package} ${db:Status-Status}\n' 'linux-image-*' 2>/dev/null |
    awk '$2 == "installed" && $1 !~ /^linux-image-(unsigned-)?[0-9]/ {sub("image", "headers"); print $1}' |
    while read -r name; do
        apt-cache show "$name" >/dev/null 2>&1 && echo "$name"
    done
exit 0

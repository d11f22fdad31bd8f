#!/bin/sh
# missing.sh KERNEL PACKAGE...: the packages that are neither installed nor offered by an archive, then the
# headers that are offered for kernels of this kind (generic, amd64). Reads only.
kernel=$1
shift
for name; do
    status=$(dpkg-query --show --showformat '${db:Status-Status}' "$name" 2>/dev/null)
    [ "$status" = installed ] || apt-cache show "$name" >/dev/null 2>&1 || echo "missing $name"
done
apt-cache pkgnames linux-headers- | grep "^linux-headers-[0-9].*-${kernel##*-}\$" | sort -V | tail -n 3 | sed 's/^/offered /'
exit 0

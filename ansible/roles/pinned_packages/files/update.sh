#!/bin/sh
# update.sh SECONDS OPTION...: `apt-get update`, which gives up at once where another apt reads the indexes:
# DPkg::Lock::Timeout is for dpkg's locks only. Waits SECONDS for it, then names the program that holds it.
limit=$1
shift
end=$(($(date +%s) + limit))
errors=$(mktemp) || exit
trap 'rm -f "$errors"' EXIT
while :; do
    apt-get update "$@" 2>"$errors"
    code=$?
    grep -q '^E: Could not get lock' "$errors" || break
    if [ "$(date +%s)" -ge "$end" ]; then
        holder=$(sed -n 's/^E: Could not get lock .* process \([0-9]*\).*/\1/p' "$errors" | head -n 1)
        if [ -n "$holder" ] && [ -r "/proc/$holder/cmdline" ]; then
            # a bare Debian has no ps
            unit=$(sed -n 's|^0::.*/\([^/]*\.service\)$|\1 |p' "/proc/$holder/cgroup")
            echo "the indexes are held by: $unit$holder $(tr '\0\n' '  ' <"/proc/$holder/cmdline")" >&2
        fi
        break
    fi
    sleep 1
done
cat "$errors" >&2
exit "$code"

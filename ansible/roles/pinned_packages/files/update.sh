#!/bin/sh
# update.sh SECONDS OPTION...: `apt-get update`, which gives up at once where another apt reads the indexes:
# DPkg::Lock::Timeout is for dpkg's locks only. Waits SECONDS for it, then says who has it.
limit=$1
shift
end=$(($(date +%s) + limit))
words=$(mktemp) || exit
trap 'rm -f "$words"' EXIT
while :; do
    apt-get update "$@" 2>"$words"
    code=$?
    grep -q '^E: Could not get lock' "$words" || break
    if [ "$(date +%s)" -ge "$end" ]; then
        holder=$(sed -n 's/^E: Could not get lock .* process \([0-9]*\).*/\1/p' "$words" | head -n 1)
        [ -z "$holder" ] || ps -o unit=,pid=,args= -p "$holder" | sed 's/^ *\(- *\)*/the indexes are held by: /' >&2
        break
    fi
    sleep 1
done
cat "$words" >&2
exit "$code"

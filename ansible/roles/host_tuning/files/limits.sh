#!/bin/sh
# The power limit of each card, within LIMIT_S seconds. Reads only. Under a driver that hangs nvidia-smi
# ignores even SIGKILL, and timeout(1) would wait for it: it is left behind instead.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
    nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits
    echo $? >"$folder/code"
} >"$folder/out" 2>"$folder/err" </dev/null &
waited=0
while [ ! -s "$folder/code" ]; do
    if [ "$waited" -ge $((LIMIT_S * 10)) ]; then
        echo "nvidia-smi did not answer within $LIMIT_S s" >&2
        exit 124
    fi
    sleep 0.1
    waited=$((waited + 1))
done
cat "$folder/out"
cat "$folder/err" >&2
exit "$(cat "$folder/code")"

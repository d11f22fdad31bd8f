#!/bin/sh
# DO=look|set|restore; KNOBS has a line NAME=VALUE for each knob. Says what differs, and with `set`
# notes what was there before the first time and sets it; `restore` sets what was noted. A knob that
# this kernel does not have is passed over.
set -u
noted=/var/lib/sm120/before/sysctls

one_line() { tr -s '[:space:]' ' ' | sed 's/ $//'; }

adjust() { # adjust NAME VALUE
    now=$(sysctl -n "$1" 2>/dev/null | one_line) || return 0
    [ -n "$now" ] || return 0
    if [ "$DO" = set ] && ! grep -q "^$1=" "$noted" 2>/dev/null; then
        mkdir -p "${noted%/*}" && echo "$1=$now" >>"$noted"
    fi
    [ "$now" = "$2" ] && return 0
    echo "$1: $now -> $2"
    [ "$DO" = look ] || sysctl -q -w "$1=$2"
}

each() {
    while IFS='=' read -r name value; do
        [ -z "$name" ] || adjust "$name" "$value" || exit 1
    done
}

if [ "$DO" = restore ]; then
    [ ! -e "$noted" ] || each <"$noted"
else
    printf '%s\n' "$KNOBS" | each
fi

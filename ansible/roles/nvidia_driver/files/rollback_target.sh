#!/bin/sh
# rollback_target.sh FOLDER PREFERENCES: the recorded driver to go back to, as JSON. One that a rollback chose and did not finish; else
# the one that worked last; else, where apt is pinned to that one, the one before it. Reads only.
cd "$1" 2>/dev/null || exit 1
[ ! -s rollback.json ] || exec cat rollback.json
[ -s working.json ] || exit 1
python3 - "$2" <<'END'
import json, os, re, sys
text = open(sys.argv[1], encoding="utf-8").read() if os.path.exists(sys.argv[1]) else ""
pinned = set(re.findall(r"^Package: (\S+)\nPin: version (\S+)$", text, re.M))
for name in ("working.json", "before.json"):
    if os.path.exists(name):
        record = json.load(open(name, encoding="utf-8"))
        if {(pin["name"], pin["version"]) for pin in record["pins"]} != pinned:
            print(json.dumps(record))
            break
END

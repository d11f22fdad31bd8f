#!/bin/sh
# Starts a program of llama.cpp, the server unless another is named. Which build of the CPU's kernels
# this CPU runs, the program itself decides and says in its first lines ("load_backend").
set -eu
program=llama-server
case "${1:-}" in
llama-server | llama-bench | llama-quantize)
    program=$1
    shift
    ;;
esac
# Reached from outside the container unless the arguments say otherwise: of two, the last one counts.
[ "$program" != llama-server ] || set -- --host 0.0.0.0 --port 8080 "$@"
echo "llama.cpp 0c1e5709: $program" >&2
exec "/opt/llama-cpp/$program" "$@"

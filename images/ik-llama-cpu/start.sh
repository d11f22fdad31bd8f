#!/bin/sh
# Starts the build of ik_llama.cpp that this CPU can run, and says which one it is.
set -eu
variants=/opt/ik-llama
if [ -d "$variants/armv8.2" ]; then
    # What the kernel told this process; in an emulator /proc/cpuinfo is that of the machine below.
    flags=" $(LD_SHOW_AUXV=1 /bin/true | sed -n 's/^AT_HWCAP:[[:space:]]*//p') "
    needed="asimddp asimdhp fphp"
else
    flags=" $(sed -n 's/^flags[[:space:]]*: //p' /proc/cpuinfo | head -n 1) "
    needed="avx2 fma f16c"
fi
can() {
    for feature in "$@"; do
        case "$flags" in *" $feature "*) ;; *) return 1 ;; esac
    done
}
# unquoted: a list of words
if ! can $needed; then
    echo "ik_llama.cpp: this CPU lacks one of $needed, which every build here needs" >&2
    exit 78
fi
if [ -d "$variants/armv8.2" ]; then
    variant=armv8.2
elif can avx512f avx512bw && [ -d "$variants/avx512" ]; then
    variant=avx512
else
    variant=avx2
fi
program=llama-server
case "${1:-}" in
llama-server | llama-bench | llama-sweep-bench | llama-quantize)
    program=$1
    shift
    ;;
esac
# Reached from outside the container unless the arguments say otherwise: of two, the last one counts.
[ "$program" != llama-server ] || set -- --host 0.0.0.0 --port 8080 "$@"
echo "ik_llama.cpp 55d3c05b: $program built for $variant" >&2
exec "$variants/$variant/$program" "$@"

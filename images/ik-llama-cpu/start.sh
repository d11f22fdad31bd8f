#!/bin/sh
# Starts the build of ik_llama.cpp that this CPU can run, and says which one it is.
set -eu
variants=/opt/ik-llama
refuse() {
    echo "ik_llama.cpp: this CPU has no $1, which every build here needs" >&2
    exit 78
}
if [ -d "$variants/armv8.2" ]; then
    # Bits of the kernel's <asm/hwcap.h>: fphp, asimdhp, asimddp. Not from /proc/cpuinfo, which in
    # an emulator is that of the machine below.
    hwcap=$(LD_SHOW_AUXV=1 /bin/true | sed -n 's/^AT_HWCAP:[[:space:]]*//p')
    [ $((0x$hwcap & 0x100600)) -eq $((0x100600)) ] || refuse "dot products and half floats"
    variant=armv8.2
else
    flags=" $(sed -n 's/^flags[[:space:]]*: //p' /proc/cpuinfo | head -n 1) "
    can() {
        for feature in "$@"; do
            case "$flags" in *" $feature "*) ;; *) return 1 ;; esac
        done
    }
    can avx2 fma f16c || refuse "AVX2 with FMA and F16C"
    variant=avx2
    if can avx512f avx512bw avx512vl && [ -d "$variants/avx512" ]; then
        variant=avx512
    fi
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

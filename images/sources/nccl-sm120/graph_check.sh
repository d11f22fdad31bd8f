#!/bin/sh
# Links the check with NCCL's own objects: the library itself hides these functions.
set -eu
src=/src/src
g++ -std=c++17 -O1 -w -DCUDA_MAJOR=13 -DNCCL_OS_LINUX -DPROFAPI \
    -I "$src" -I "$src/graph" -I "$src/include" -I "$src/include/plugin" -I /build/include \
    -I /usr/local/cuda/include -I /usr/local/cuda/include/cccl \
    -o /tmp/graph_check /src/sm120/graph_check.cc $(find /build/obj -name '*.o' ! -name client.o) \
    -L /usr/local/cuda/lib64 -lcudart_static -lpthread -lrt -ldl
exec /tmp/graph_check

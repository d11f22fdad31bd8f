# What every build of ik_llama.cpp here has in common; given to CMake with -C.
set(CMAKE_BUILD_TYPE Release CACHE STRING "")
# Four programs share one libggml: as static programs each would hold 80 MB of the same GPU code.
set(BUILD_SHARED_LIBS ON CACHE BOOL "")
# Programs and libraries in one folder, and found there wherever the folder lies.
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY /build/bin CACHE PATH "")
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON CACHE BOOL "")
# Not the CPU of the machine that compiles: each build names its instruction sets.
set(GGML_NATIVE OFF CACHE BOOL "")
# Objects are kept by the launcher that the pipeline sets; ggml's own search for ccache would
# put a second one before it.
set(GGML_CCACHE OFF CACHE BOOL "")
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "")
# No downloads by the server: weights are fetched and proved before it starts.
set(LLAMA_CURL OFF CACHE BOOL "")
# The CPU's flash attention aborts with eight slots (iqk_fa_templates.h:1157 of this commit).
set(GGML_IQK_FLASH_ATTENTION OFF CACHE BOOL "")
# Tensor parallelism over NCCL is not part of any recipe here, and `-sm graph` is reported to give
# wrong text with experts on the CPU.
set(GGML_NCCL OFF CACHE BOOL "")

# What every build of llama.cpp here has in common; given to CMake with -C.
set(CMAKE_BUILD_TYPE Release CACHE STRING "")
# The commit of the archive's files: without git the programs would call it unknown.
set(LLAMA_BUILD_COMMIT "0c1e5709" CACHE STRING "")
# Programs share libraries that lie beside them, found there wherever the folder lies; by one name
# each, as an image's layer has no use for libggml.so.0.25.3 and two links to it.
set(BUILD_SHARED_LIBS ON CACHE BOOL "")
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON CACHE BOOL "")
set(CMAKE_PLATFORM_NO_VERSIONED_SONAME ON CACHE BOOL "")
# Not the CPU of the machine that compiles: the kernels for the CPU are compiled for fourteen
# generations of processors, and the program loads the best one that this CPU can run.
set(GGML_NATIVE OFF CACHE BOOL "")
set(GGML_BACKEND_DL ON CACHE BOOL "")
set(GGML_CPU_ALL_VARIANTS ON CACHE BOOL "")
# Objects are kept by the launcher that the pipeline sets; ggml's own search for ccache would
# put a second one before it.
set(GGML_CCACHE OFF CACHE BOOL "")
set(LLAMA_BUILD_TESTS OFF CACHE BOOL "")
set(LLAMA_BUILD_EXAMPLES OFF CACHE BOOL "")
set(LLAMA_BUILD_APP OFF CACHE BOOL "")
# No downloads by the server: weights are fetched and proved before it starts.
set(LLAMA_OPENSSL OFF CACHE BOOL "")
# The web page is not in the archive: upstream fetches it while it compiles, or builds it with npm.
# The server answers its API without it.
set(LLAMA_BUILD_UI OFF CACHE BOOL "")
set(LLAMA_USE_PREBUILT_UI OFF CACHE BOOL "")
# No image here has NCCL beside llama.cpp; said, so that a toolchain that has it changes nothing.
set(GGML_CUDA_NCCL OFF CACHE BOOL "")

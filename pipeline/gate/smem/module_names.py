"""Which modules a wheel is imported by, from its project's name alone.

A lock names projects. Whether a module is absent from the gate's environment must not depend on
what else the store happens to hold: the same lock gives the same names, and so the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable

# Projects whose modules are not called as they are; read from every wheel of the committed locks.
_MODULES: dict[str, tuple[str, ...]] = {
    "apache-tvm-ffi": ("tvm_ffi",),
    "attrs": ("attr", "attrs"),
    "cuda-bindings": ("cuda",),
    "cuda-core": ("cuda",),
    "cuda-pathfinder": ("cuda",),
    "cuda-tile": ("cuda",),
    "cython": ("Cython", "cython"),
    "decord2": ("decord", "decord2"),
    "dnspython": ("dns",),
    "flash-attn-4": ("flash_attn",),
    "flashinfer-python": ("flashinfer",),
    "googleapis-common-protos": ("google",),
    "grpcio": ("grpc",),
    "grpcio-health-checking": ("grpc_health",),
    "grpcio-reflection": ("grpc_reflection",),
    "grpcio-tools": ("grpc_tools",),
    "humming-kernels": ("humming",),
    "ipython": ("IPython",),
    "lm-format-enforcer": ("lmformatenforcer",),
    "markdown-it-py": ("markdown_it",),
    "nccl-extensions": ("nccl",),
    "nccl4py": ("nccl",),
    "nvidia-cudnn-frontend": ("cudnn",),
    "nvidia-cutlass-dsl-libs-base": ("nvidia_cutlass_dsl",),
    "nvidia-cutlass-dsl-libs-core": ("nvidia_cutlass_dsl",),
    "nvidia-cutlass-dsl-libs-cu12": ("nvidia_cutlass_dsl",),
    "nvidia-cutlass-dsl-libs-cu13": ("nvidia_cutlass_dsl",),
    "nvidia-ml-py": ("pynvml",),
    "nvshmem4py-cu13": ("nvshmem",),
    "opencv-python-headless": ("cv2",),
    "oss-harmony": ("openai_harmony",),
    "pillow": ("PIL", "pillow"),
    "protobuf": ("google",),
    "py-cpuinfo": ("cpuinfo",),
    "pycryptodomex": ("Cryptodome",),
    "pyjwt": ("jwt",),
    "pynvvideocodec": ("PyNvVideoCodec", "pynvvideocodec"),
    "python-dateutil": ("dateutil",),
    "python-dotenv": ("dotenv",),
    "python-json-logger": ("pythonjsonlogger",),
    "python-multipart": ("multipart", "python_multipart"),
    "pyyaml": ("yaml",),
    "pyzmq": ("pyzmq", "zmq"),
    "quack-kernels": ("quack",),
    "rpds-py": ("rpds",),
    "sgl-deep-ep": ("deep_ep",),
    "sgl-deep-gemm": ("deep_gemm",),
    "sgl-flash-mla": ("flash_mla",),
    "sgl-kernel": ("deep_gemm", "sgl_kernel", "triton_kernels"),
    "sglang-kernel": ("sgl_kernel", "triton_kernels"),
    "tiktoken": ("tiktoken", "tiktoken_ext"),
    "z3-solver": ("z3",),
}
# Projects that share one package: nvidia-cublas, nvidia-nccl-cu13, opentelemetry-sdk ...
_SHARED = {"nvidia-": "nvidia", "opentelemetry-": "opentelemetry"}


def modules_of(project: str) -> tuple[str, ...]:
    """The top-level modules that a project's wheel brings."""
    if project in _MODULES:
        return _MODULES[project]
    shared = [package for prefix, package in _SHARED.items() if project.startswith(prefix)]
    return tuple(shared) or (project.replace("-", "_").replace(".", "_"),)


def absent_modules(locked: Iterable[str], present: set[str]) -> tuple[str, ...]:
    """Modules of an image's locked projects that its gate environment does not hold."""
    real = {module for project in present for module in modules_of(project)}
    names = {module for project in locked for module in modules_of(project)} - real
    return tuple(sorted(name for name in names if name.isidentifier()))

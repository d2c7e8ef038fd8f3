"""What the tests tell XLA; apart, for whoever must do it before anything is imported."""

# XLA optimizes little: most of the time of a test's programs is their compilation.
OPTIMIZE_LITTLE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def devices(count: int) -> str:
    """Value of the environment variable XLA_FLAGS for that many CPU devices."""
    return f"--xla_force_host_platform_device_count={count} {OPTIMIZE_LITTLE}"

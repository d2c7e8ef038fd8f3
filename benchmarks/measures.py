"""The quantities that the pages show of saves and restores, and that targets are set for."""

from benchmarks.tables import Measure

BLOCKING = Measure("blocking, s", "save", "blocking_secs", digits=3)
COMMIT = Measure("to commit, s", "save", "commit_secs")
FIRST = Measure("first, s", "save", "blocking_secs", first=True)
CPU = Measure("CPU-s", "save", "cpu_secs")
CPU_RATE = Measure("CPU-s a GB", "save", "cpu_secs", per="gigabytes")
PEAK = Measure("peak over state, GB", "save", "peak_over_state_bytes", unit=1e9)
PEAK_RATIO = Measure("÷ owner slices", "save", "peak_over_state_bytes", per="slices")
RESTORE = Measure("restore, s", "restore", "restore_secs")
FIRST_RESTORE = Measure("first, s", "restore", "restore_secs", first=True)
RESTORE_AND_STEP = Measure("restore + first donated step, s", "restore", "restore_and_step_secs")
FIRST_RESTORE_AND_STEP = Measure("first + first donated step, s", "restore", "restore_and_step_secs", first=True)
READ = Measure("read calls, GB", "restore", "called_read_bytes", unit=1e9)
TO_HOST = Measure("read to host alone, s", "restore", "read_secs")

SAVING = (
    BLOCKING,
    FIRST,
    COMMIT,
    CPU,
    CPU_RATE,
    PEAK,
    PEAK_RATIO,
    Measure("stored, GB", "save", "stored_bytes", unit=1e9),
    Measure("files", "save", "files", digits=0),
)
RESTORING = (
    RESTORE,
    FIRST_RESTORE,
    Measure("CPU-s", "restore", "cpu_secs"),
    READ,
    Measure("from disk, GB", "restore", "storage_read_bytes", unit=1e9),
    TO_HOST,
    Measure("shared by replicas, GB", "restore", "shared_bytes", unit=1e9),
    RESTORE_AND_STEP,
    FIRST_RESTORE_AND_STEP,
    Measure("peak of the first, GB", "restore", "peak_bytes", first=True, unit=1e9),
)

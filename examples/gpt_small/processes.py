"""Several processes: meeting the others of a cluster, and starting some on this machine as several hosts would be."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

import jax

POLL_SECS = 0.1


def join_cluster() -> None:
    """Meet the other processes, through `jax.distributed`; before anything asks for a device.

    Where the environment has `JAX_COORDINATOR_ADDRESS` (which jax reads), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`
    (which it does not), these say it all; otherwise jax looks for a cluster that it knows.

    Raises:
        SystemExit: there is none.
    """
    process, processes = os.environ.get("JAX_PROCESS_ID"), os.environ.get("JAX_NUM_PROCESSES")
    try:
        if process is not None and processes is not None:
            # Deactivated: a scheduler below, were it detected, would take all devices but one from this process.
            jax.distributed.initialize(
                num_processes=int(processes), process_id=int(process), cluster_detection_method="deactivate"
            )
        else:
            jax.distributed.initialize()
    except ValueError as error:
        raise SystemExit(
            f"--distributed: {error} jax found no cluster; set JAX_COORDINATOR_ADDRESS (host:port of process 0), "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error


def launch(command: Sequence[str], processes: int) -> int:
    """Run a command in several processes on this machine's CPU, until they end.

    SIGTERM, SIGHUP and Ctrl-C reach each of them as SIGTERM, so that they save the step at hand and end; a second one
    kills them.

    Returns:
        0, or the exit code of one that failed; the others are killed then.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
    }
    running: list[subprocess.Popen[bytes]] = []
    how = signal.SIGTERM

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal how
        for process in running:
            process.send_signal(how)
        how = signal.SIGKILL

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        for process_id in range(processes):
            environment = common | {"JAX_PROCESS_ID": str(process_id)}
            # A session of its own, or Ctrl-C would interrupt each process as well, wherever it is.
            running.append(subprocess.Popen(command, env=environment, start_new_session=True))
        while True:
            codes = [process.poll() for process in running]
            if failed := [code for code in codes if code]:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            if None not in codes:
                return 0
            time.sleep(POLL_SECS)
    finally:
        for process in running:
            process.kill()  # one that waits for a dead one in a collective heeds nothing else
            process.wait()

"""Train a GPT data-parallel on all devices, with checkpoints: `python examples/gpt_small/train.py --help`."""

import argparse
import os
import sys
from pathlib import Path

import jax
from data import ShuffledBatches, load_tokens
from jax.sharding import AxisType, Mesh
from processes import join_cluster, launch
from report import Report
from settings import Settings
from state import create_state, shard_batch, train_step

import flax_rpsave as rps

CPU_DEVICES = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=Path(__file__).parent / "config.yaml", help="YAML file of the run")
    parser.add_argument("--data", metavar="FILE", help="text to train on, in place of the standard library's sources")
    parser.add_argument("--steps", type=int, help="in place of the file's `steps`")
    parser.add_argument("--directory", help="in place of the file's `checkpoint.directory`")
    parser.add_argument(
        "--devices",
        type=int,
        help=f"devices of this machine to use: all by default, and {CPU_DEVICES} on CPU; --processes divides them",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="N processes on this machine's CPU, as N hosts would be"
    )
    parser.add_argument("--distributed", action="store_true", help="this is one process of many: find the others")
    parser.add_argument("--log", metavar="FILE", help="append a JSON line a step (its loss exactly) and a save")
    return parser.parse_args()


def share_of_devices(devices: int, processes: int) -> int:
    if processes < 1 or devices % processes:
        raise SystemExit(f"--processes must divide the {devices} devices, got {processes}: see --devices")
    return devices // processes


def create_mesh(devices: int | None) -> Mesh:
    """A mesh of the first `devices` devices of each process, on CPU virtual ones.

    XLA reads its flags when the first device is asked for, so this comes before anything else that uses jax. The
    time-out is for machines of few cores, where the threads of an all-reduce may wait long for each other.
    """
    flags = [
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        f"--xla_force_host_platform_device_count={devices or CPU_DEVICES}",
    ]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    if devices is not None and devices < 1:
        raise SystemExit(f"--devices: at least one is needed, got {devices}")
    available = [jax.local_devices(process_index=process) for process in range(jax.process_count())]
    if devices is not None and devices > min(map(len, available)):
        raise SystemExit(f"--devices: {devices} of a process are wanted, there are {min(map(len, available))}")
    mesh_devices = [device for of_process in available for device in of_process[:devices]]
    return jax.make_mesh((len(mesh_devices),), ("data",), axis_types=(AxisType.Auto,), devices=mesh_devices)


def train(settings: Settings, mesh: Mesh, *, log: str | None) -> None:
    """Train to `settings.steps`, from the newest checkpoint where there is one."""
    if settings.data.batch_size % mesh.size:
        raise SystemExit(f"{mesh.size} devices must divide the batch size, {settings.data.batch_size}: see --devices")
    batches = ShuffledBatches(
        load_tokens(settings.data),
        batch_size=settings.data.batch_size,
        context=settings.model.context,
        seed=settings.data.seed,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    state = create_state(settings, mesh)
    report = Report(log, num_steps=settings.steps, quiet=jax.process_index() > 0)
    with report, rps.CheckpointCallback(settings.checkpoint, data=batches, on_commit=report.saved) as checkpoint:
        state, step = checkpoint.resume(state)
        report.start(step)
        while step < settings.steps and not checkpoint.should_stop:
            loss = float(train_step(state, shard_batch(next(batches), mesh)))  # reading it bounds the steps in flight
            step += 1
            report.step(step, loss)
            checkpoint(step, state, metrics={"loss": loss})
        checkpoint(step, state, force=True)


def main() -> None:
    arguments = parse_arguments()
    devices = arguments.devices
    if arguments.processes is not None:
        devices = share_of_devices(devices or CPU_DEVICES, arguments.processes)
    if arguments.distributed:  # also where `--processes` has started this process
        join_cluster()
    elif arguments.processes is not None:
        sys.exit(launch([sys.executable, *sys.argv, "--distributed"], arguments.processes))
    mesh = create_mesh(devices)
    for file in (arguments.config, arguments.data):
        if file is not None and not Path(file).is_file():
            raise SystemExit(f"{file}: no such file")
    settings = Settings.from_yaml(
        arguments.config, steps=arguments.steps, data=arguments.data, directory=arguments.directory
    )
    train(settings, mesh, log=arguments.log)


if __name__ == "__main__":
    main()

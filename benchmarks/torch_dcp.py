"""The trials of torch's distributed checkpoints, which run in an environment that has torch and not JAX.

The same work as `trial` does, on the same bytes: each of the processes (gloo) holds every leaf of the case as a CPU
tensor. DCP finds by itself that they are replicated, and divides them among the processes.
"""

import gc
import json
import os
import shutil
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import meters
from benchmarks.request import IDLE_SECS, LEAVES, Request

State = dict[str, torch.Tensor]


def materialize(request: Request) -> State:
    """Random values in the shapes of the case's leaves; the same in all processes."""
    torch.manual_seed(request.seed)
    leaves = json.loads(Path(request.directory, LEAVES).read_text())
    return {
        name: torch.randn(shape) if dtype == "float32" else torch.full(shape, 1000, dtype=getattr(torch, dtype))
        for name, (shape, dtype) in leaves.items()
    }


def _begin_save(peer: str, state: State, path: Path) -> Future | None:
    if peer == "torch_dcp_async":
        return dcp.async_save(state, checkpoint_id=path)
    dcp.save(state, checkpoint_id=path)
    return None


def save(request: Request) -> dict[str, Any]:
    """See `trial.save`."""
    checkpoints = Path(request.directory, "checkpoints")
    state = materialize(request)
    meters.give_back()
    baseline = meters.resident_bytes()
    meter, saves = meters.Meter(), []
    for step in range(1, request.repeats + 2):
        dist.barrier()  # all have counted the files of the save before
        if request.process == 0:
            shutil.rmtree(checkpoints / str(step - 1), ignore_errors=True)
            os.sync()
        time.sleep(IDLE_SECS)
        dist.barrier()
        meter.start()
        began = time.perf_counter()
        future = _begin_save(request.peer, state, checkpoints / str(step))
        blocking_secs = time.perf_counter() - began
        if future is not None:
            future.result()
        usage = meter.stop()
        dist.barrier()
        saves.append(meters.save_record(blocking_secs, usage, baseline, checkpoints / str(step)))
    return {"saves": saves}


def restore(request: Request) -> dict[str, Any]:
    """See `trial.restore`."""
    checkpoints = Path(request.directory, "checkpoints")
    (path,) = checkpoints.iterdir()
    expected = materialize(request)
    meter, restores, state = meters.Meter(), [], None
    for _ in range(request.repeats + 1):
        meters.drop_from_page_cache(checkpoints)
        del state
        gc.collect()
        dist.barrier()
        before = meters.resident_bytes()
        meter.start()
        state = {name: torch.empty_like(values) for name, values in expected.items()}
        dcp.load(state, checkpoint_id=path)
        usage = meter.stop()
        wrong = [name for name, values in expected.items() if not torch.equal(state[name], values)]
        restores.append(meters.restore_record(usage, before, shared_bytes=0, differences=wrong))
    return {"restores": restores}


def main() -> None:
    request = Request.from_json(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method=f"tcp://{request.coordinator}", world_size=request.processes, rank=request.process
    )
    answer = {"load_before": os.getloadavg()[0]} | {"save": save, "restore": restore}[request.kind](request)
    Path(sys.argv[2]).write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

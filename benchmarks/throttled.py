"""The trial of one process of a run whose processes have a network card each and save to an object store.

What is measured is how saving scales with hosts, which one machine can show only where its own disk and cores are not
the limit: cards of some MB/s leave both nearly idle.
"""

import os
import time
from typing import Any

from jax.experimental import multihost_utils

from benchmarks import object_store, peers, states
from benchmarks.card import Card
from benchmarks.request import Request


def save(request: Request) -> dict[str, Any]:
    """Saves once at full speed, so that compilation and first touches are over, then `repeats` times throttled."""
    state, _ = states.materialize(states.CASES[request.case].abstract(request.scale), request.seed)
    with Card(request.server_port) as card:
        os.environ.update(object_store.ACCESS, AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{card.port}")
        peer = peers.PEERS[request.peer].open(f"s3://{object_store.BUCKET}/run")
        peer.prepare(state)
        saves = []
        for step in range(1, request.repeats + 2):
            card.limit(0 if step == 1 else request.bytes_per_sec)
            multihost_utils.sync_global_devices(f"before step {step}")
            began = time.perf_counter()
            blocking_secs = peer.save(step, state)
            peer.wait()
            commit_secs = time.perf_counter() - began
            sent_bytes, received_bytes = card.limit(0)
            saves.append(
                {
                    "blocking_secs": blocking_secs,
                    "commit_secs": commit_secs,
                    "sent_bytes": sent_bytes,
                    "received_bytes": received_bytes,
                    "own_stats": peer.stats(),
                }
            )
        peer.close()
    return {"throttled_saves": saves}

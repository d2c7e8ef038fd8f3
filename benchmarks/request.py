"""What a trial is asked to do: from `run` to the trial's processes, as JSON. Imports nothing that they may lack."""

import dataclasses
import json
from typing import Self

LEAVES = "leaves.json"
"""File in a request's directory, for programs that cannot build the case: leaf -> its shape and dtype."""

IDLE_SECS = 0.5
"""Between saves, so that the peer's threads have come to rest."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a trial is to do.

    Attributes:
        kind: what work; a key of the program's `KINDS`.
        case, scale, seed: the state.
        peer: a key of `peers.PEERS`; empty where the trial has none.
        directory: exists, empty but for what the trial before left for this one; all processes of a trial share it.
        repeats: how many saves or restores after the first one.
        processes: how many processes do the trial together.
        process: which of them this one is.
        coordinator: `host:port` where they meet.
        server_port: of the object store on this machine; 0 where the trial has none.
        bytes_per_sec: what each process's network card lets through.
    """

    kind: str
    case: str
    scale: float
    seed: int
    peer: str
    directory: str
    repeats: int
    processes: int = 1
    process: int = 0
    coordinator: str = ""
    server_port: int = 0
    bytes_per_sec: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

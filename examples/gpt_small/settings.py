"""The YAML file of a run: one frozen dataclass a section, and the `checkpoint:` block for flax_rpsave."""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from data import DataConfig
from model import ModelConfig

import flax_rpsave as rps


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, cosine decay and clipping: the `optimizer:` section of the YAML file."""

    learning_rate: float
    """The peak, after `warmup_steps`."""
    warmup_steps: int
    decay_steps: int
    """Where the cosine ends, at a tenth of the peak; not tied to `steps`, so a run may stop early or be prolonged."""
    weight_decay: float = 0.1
    """Of matrices; vectors (biases, norms) do not decay."""
    b2: float = 0.95
    clip_norm: float = 1.0


@dataclass(frozen=True)
class Settings:
    """All that a run depends on."""

    steps: int
    seed: int
    model: ModelConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: rps.CheckpointConfig

    @classmethod
    def from_yaml(
        cls, path: str | Path, *, steps: int | None = None, data: str | None = None, directory: str | None = None
    ) -> "Settings":
        """Read a YAML file; an argument that is given takes the place of the file's value."""
        sections = yaml.safe_load(Path(path).read_text())
        settings = cls(
            steps=sections["steps"],
            seed=sections["seed"],
            model=ModelConfig(**sections["model"]),
            optimizer=OptimizerConfig(**sections["optimizer"]),
            data=DataConfig(**sections["data"]),
            checkpoint=rps.CheckpointConfig.from_yaml(path),
        )
        if steps is not None:
            settings = replace(settings, steps=steps)
        if data is not None:
            settings = replace(settings, data=replace(settings.data, path=data))
        if directory is not None:
            settings = replace(settings, checkpoint=replace(settings.checkpoint, directory=directory))
        return settings

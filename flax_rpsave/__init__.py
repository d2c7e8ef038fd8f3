"""Replica-parallel, asynchronous checkpoints for Flax/Optax training loops."""

__version__ = "0.1.0"

"""What people bring along from other tools and from YAML, and what to write here instead.

Only the wording of errors comes from this module: nothing here decides what is accepted. The spellings are those of
Orbax, Flax, MaxText, t5x, levanter, torchtitan, Lightning, Keras, Hugging Face transformers, TensorFlow and MindSpore.
"""

import difflib
import math
import numbers
import re
import reprlib
import signal
from collections.abc import Collection, Iterable, Mapping
from typing import Any

# Our key, dotted inside the section → the names that other tools give it.
_SPELLINGS: dict[str, str] = {
    "enabled": "enable_checkpoint enable_checkpointing enable_checkpointer save_checkpoints do_save",
    "directory": """
        dir path root folder dirpath filepath base_path output_dir save_dir save_path ckpt_dir ckpt_path checkpoint_dir
        checkpoint_path checkpoint_directory checkpoint_folder base_output_directory default_root_dir workdir work_dir
        model_dir logging_dir""",
    "save_interval_steps": """
        every every_n every_n_steps every_n_train_steps interval interval_steps period freq frequency steps save
        save_interval save_every save_every_steps save_every_n_steps save_steps save_freq save_period save_strategy
        step_interval save_checkpoint_steps save_checkpoints_steps checkpoint_every checkpoint_period
        checkpoint_interval checkpoint_steps checkpoint_freq checkpoint_frequency ckpt_every ckpt_steps ckpt_interval
        local_checkpoint_period""",
    "max_to_keep": """
        keep keep_n keep_last keep_last_n keep_latest keep_latest_n keep_latest_k keep_max max_keep num_to_keep num_keep
        keep_checkpoint_max max_checkpoints max_num_checkpoints max_num_checkpoints_to_keep save_total_limit total_limit
        checkpoints_total_limit""",
    "keep_period": "keep_every keep_every_n keep_every_n_steps keep_ckpt_steps keep_interval keep_steps",
    "keep_best": "save_top_k top_k save_best save_best_only best_fn best_n best_metric load_best_model_at_end",
    "keep_best.metric": "monitor metric_name metric_for_best_model",
    "keep_best.mode": "best_mode greater_is_better higher_is_better",
    "resume": """
        resume_from resume_from_checkpoint restore auto_resume load_step load_checkpoint load_full_state_path overwrite
        overwrite_output_dir""",
    "async_save": """
        async asynchronous async_mode async_checkpoint async_checkpointing async_options use_async enable_async
        enable_async_checkpointing""",
    "on_error": "raise_on_error ignore_errors fail_on_error",
    "commit_timeout_secs": "timeout timeout_secs async_timeout_secs ckpt_timeout barrier_timeout_secs",
    "save_on_preemption": "preemption enable_autocheckpoint enable_preemption",
    "preemption_signals": "signal signals preemption_signal",
    "item": "item_name item_names checkpoint_name state_name checkpointables_name",
    "max_staging_gb": """
        staging_gb max_concurrent_gb save_concurrent_gb save_device_host_concurrent_gb save_concurrent_bytes
        save_device_host_concurrent_bytes checkpoint_storage_concurrent_gb""",
    "replica_parallel.enable": "use_replica_parallel enable_replica_parallel",
    "replica_parallel.min_slice_bytes": """
        min_slice min_slice_size min_bytes_per_replica min_slice_bytes_for_replica_parallel""",
    "replica_parallel.max_replicas": "max_writers num_replicas replicas max_replicas_for_replica_parallel",
    "storage.use_ocdbt": "ocdbt enable_ocdbt checkpoint_storage_use_ocdbt",
    "storage.compression": "compress compressor codec use_compression",
    "storage.checksum": "crc crc32c checksums verify enable_checksum",
}
_MEANT = {name: meant for meant, names in _SPELLINGS.items() for name in names.split()}
# What those keys hold, where it is not what the other tool's key holds.
_HOLDS: dict[str, str] = {
    "keep_best": "{metric: …, mode: min or max, n: 1}",
    "keep_best.mode": "min or max",
    "resume": "auto, never or required",
    "on_error": "raise or log",
    "preemption_signals": "a list such as [SIGTERM]",
    "storage.compression": "null, zstd or blosc",
}

# Names of what does not exist here → why, or what takes its place.
_NOT_OFFERED: dict[str, str] = {
    name: why
    for names, why in (
        (
            "save_weights_only save_only_model load_parameters_path",
            'the whole state is saved; load(path, subtree="params") reads a part of it',
        ),
        (
            "filename prefix step_prefix step_name_format step_format_fixed_length auto_insert_metric_name",
            "a step's directory is named by its number, which is where Orbax looks",
        ),
        ("save_last", "the newest step is always kept, and a call with force=True saves the last one"),
        ("use_zarr3 checkpoint_storage_use_zarr3", "arrays are always stored as zarr3"),
        ("save_dataset keep_dataset_checkpoints", "data-iterator state is saved where the callback is given `data`"),
        ("todelete_subdir enable_background_delete cleanup_tmp_directories", "it is always done, in the background"),
        ("create", "the directory is always made"),
    )
    for name in names.split()
}
_TIME = re.compile(r"(?:^|_)(?:secs?|seconds?|mins|minutes?|hours?|hrs?|days?|time|duration)(?:_|$)")

# Key → what switches it off, or the shape that it has; said where a number is too small and where a type is wrong.
_INSTEAD: dict[str, str] = {
    "save_interval_steps": "`enabled: false` switches saving off",
    "max_to_keep": "null keeps all; the newest step is never deleted",
    "keep_period": "null keeps no step for its number",
    "max_replicas": "null sets no cap, and `enable: false` saves with one replica",
    "max_staging_gb": "null sets no limit",
    "min_slice_bytes": "0 sets no floor",
    "commit_timeout_secs": "a wait without an end is not offered",
    "n": "`keep_best: null` switches it off",
    "keep_best": "write {metric: loss, mode: min, n: 1}",
    "replica_parallel": "write {enable: true} or {enable: false}, or leave it out",
    "storage": "write {compression: zstd}, say, or leave it out",
}
_RESUME = "auto, which starts at 0 where there are no steps; with required, that is an error"
_NO_RESUME = "never; it is an error over existing steps, so that two runs do not mix"
# (key, value as repr, text in lower case) → what was meant.
_MEANT_VALUES: dict[tuple[str, str], str] = {
    **{("resume", text): _RESUME for text in ("true", "yes", "on", "always", "latest")},
    **{("resume", text): _NO_RESUME for text in ("false", "no", "off", "none")},
    ("resume", "must"): "required",
    ("resume", "allow"): "auto",
    ("on_error", "ignore"): "log",
    ("on_error", "warn"): "log",
    ("on_error", "fail"): "raise",
    ("check_divergence", "raise"): "fail",
    ("check_divergence", "error"): "fail",
    ("check_divergence", "log"): "warn",
    ("check_divergence", "true"): "warn, or fail to stop the save",
    ("compression", "true"): "zstd",
    ("mode", "true"): "max where greater is better",
    ("mode", "false"): "min where greater is not better",
    ("mode", "auto"): "there is no default: min for a loss, max for an accuracy",
    ("mode", "none"): "there is no default: min for a loss, max for an accuracy",
}


class _Shortened(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = 20
        self.maxstring = self.maxother = 300

    def repr_int(self, x: int, level: int) -> str:
        """Python gives no more than 4300 digits."""
        return repr(x) if x.bit_length() <= 1024 else f"{'-' * (x < 0)}2^{x.bit_length() - 1} or more"


def shown(value: object) -> str:
    """The value as in Python, shortened: with aliases, a few lines of YAML are more than all memory holds."""
    return _shortened.repr(value)


_shortened = _Shortened()


def hint_for_value(name: str, value: Any, *, nullable: bool) -> str:
    """What to write for key `name` instead of the refused `value`; empty where nothing is known."""
    text = value.strip().lower() if isinstance(value, str) else shown(value).lower()
    if meant := _MEANT_VALUES.get((name, text)):
        return meant
    if text in ("none", "null", "nil", "~", "", "no", "off", "false") and nullable:
        return "write null" + (" (YAML reads it as text)" if isinstance(value, str) else "")
    real: Any = value if isinstance(value, numbers.Real) else 0
    if not isinstance(value, bool) and 0 < real < math.inf:
        return ""  # a number that switches nothing off
    return _INSTEAD.get(name, "")


def boolean_meant(value: object) -> str:
    """What to write for a refused value that shows a boolean; empty where it shows none."""
    shows = isinstance(value, str) and value.strip().lower() in ("true", "false", "yes", "no", "on", "off", "y", "n")
    return "it is text: write true or false, without quotes" if shows else ""


def number_meant(value: object, *, whole: bool, least: int = 1) -> str:
    """What to write for a refused value that shows a number; empty where it shows none, or one that is too small.

    Args:
        value: text, or a number.
        whole: whether only integers are accepted.
        least: the least of them; of others, all above 0 are.
    """
    why, number = "", None
    if isinstance(value, str):
        why, number = _shown_number(value.strip().lower())
    elif isinstance(value, float) and whole and value > 0:
        number = _number(str(value))
    if number is None:
        return f"{why}write a plain number such as 1000, without a unit" if why else ""
    if number < least if whole else number <= 0:
        return ""
    if whole and isinstance(number, float):
        return f"{why}write a whole number such as {math.ceil(number)}"
    return f"{why}write {number}"


def _shown_number(text: str) -> tuple[str, int | float | None]:
    """Why a number is not taken for one, and the number, if it can be told."""
    if (number := _number(text)) is not None:
        return "it is text, as quotes and exponents like 1e4 are in YAML 1.1: ", number
    if re.fullmatch(r"[+-]?0o[0-7_]*[0-7]", text):
        return "it is text, since YAML 1.1 does not know 0o: ", int(text.replace("_", ""), 8)
    if re.fullmatch(r"[+-]?[0-9]{1,3}([, '][0-9]{3})+(\.[0-9]+)?", text):
        return "it is text, since YAML does not group digits so: ", _number(re.sub("[, ']", "", text))
    return "it is text: " if re.match(r"[+-]?\.?[0-9]", text) else "", None


def _number(text: str) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def close_match(value: object, choices: Iterable[str]) -> str:
    """The choice that `value` is a misspelling of, as a hint; empty where none is near."""
    if not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value.strip().lower(), list(choices), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def signal_meant(value: object, names: Collection[str]) -> str:
    """Which of `names` stands for the same signal as `value`: a number, `TERM`, `sigterm`."""
    if isinstance(value, int) and not isinstance(value, bool) and value in set(signal.Signals):
        return f"did you mean {signal.Signals(value).name}?"
    text = (value if isinstance(value, str) else shown(value)).upper()
    text = text if text.startswith("SIG") else f"SIG{text}"
    near = [text] if text in names else difflib.get_close_matches(text, names, n=1)
    return f"did you mean {near[0]}?" if near else "SIGTERM is one"


def unknown_key(name: object, block: str, known: Mapping[str, Iterable[str]]) -> str:
    """What to say of the key `name`, which `block` does not have.

    Args:
        name: the key as written.
        block: the nested block that it stands in; empty for the section itself.
        known: block → its keys.
    """
    said = "is not a key"
    own = list(known[block])
    if not isinstance(name, str):
        return f"{said} (YAML reads on, yes, no and numbers as values, not text); the keys here: {', '.join(own)}"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_").replace(" ", "_")
    if snake == "checkpoint" and not block:
        return f"{said}: this must be what stands below `checkpoint:`, not the whole file"
    if snake in _MEANT:
        return f"{said}; {_did_you_mean(_MEANT[snake])}"
    if snake in _NOT_OFFERED:
        return f"{said}; it is not offered: {_NOT_OFFERED[snake]}"
    if "timeout" not in snake and _TIME.search(snake):
        instead = "keep_period" if snake.startswith("keep") else "save_interval_steps"
        return (
            f"{said}; not offered are intervals in time, because the clocks of processes differ and each would save "
            f"another step; use {instead}"
        )
    if "epoch" in snake:
        return f"{said}; not offered, as epochs are not counted: save_interval_steps counts completed updates"
    if near := difflib.get_close_matches(snake, own, n=1, cutoff=0.85):
        return f"{said}; {_did_you_mean(_dotted(block, near[0]))}"
    for other, keys in known.items():
        if snake in keys:
            return f"{said}; {_did_you_mean(_dotted(other, snake))}"
    everywhere = {key: _dotted(other, key) for other, keys in known.items() for key in keys}
    candidates = _MEANT | everywhere
    if near := difflib.get_close_matches(snake, candidates, n=1, cutoff=0.7):
        return f"{said}; {_did_you_mean(candidates[near[0]])}"
    return f"{said}; the keys here: {', '.join(own)}"


def _did_you_mean(key: str) -> str:
    return f"did you mean {key}{f' ({_HOLDS[key]})' if key in _HOLDS else ''}?"


def _dotted(block: str, key: str) -> str:
    return f"{block}.{key}" if block else key

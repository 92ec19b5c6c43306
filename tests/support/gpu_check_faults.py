"""Gates that end badly, each in its own way."""

import os
import threading

import mlx.core as mx

from scripts.gpu_check.gates import attention
from scripts.gpu_check.record import Options, Record


def crash(options: Options, record: Record) -> None:
    """Kill the process behind a row, as a fault of a driver does."""
    record.table("row")
    record.row("found before")
    os.abort()


def fail(options: Options, record: Record) -> None:
    raise RuntimeError(f"planted in {__file__}")


def hang(options: Options, record: Record) -> None:
    threading.Event().wait()


def wrong(options: Options, record: Record) -> None:
    """Attend to other memory than was given, as MLX on CUDA does."""
    attend = attention.attend

    def attend_to_others(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return attend(queries, keys, values[:, :, ::-1])

    attention.attend = attend_to_others
    attention.run(options, record)

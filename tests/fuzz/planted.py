"""A target with a fault of each kind, to show that each is found and named."""

import os
import sys
import threading
from typing import Final

from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target


def run(data: bytes) -> None:
    match data:
        case b"loops":
            while True:
                pass
        case b"fills the memory":
            bytearray(1 << 34)
        case b"dies":
            os.abort()
        case b"ends":
            sys.exit(0)
        case b"waits":
            threading.Event().wait()
        case _:
            assert b"fault" not in data, data


TARGET: Final = Target(run=run, mutate=bytes_mutation(b"fa", b"ult"), cpu_seconds=1)

"""Work in the background, so that a repetition does not run on an idle machine.

    with Load() as load: ...
    load.rounds        # > 0: it really ran

torch releases the interpreter inside its kernels, so one thread is enough to shuffle the allocator
and to take half of a core, in bursts.
"""

import threading
import time

import torch


class Load:
    """A thread that multiplies matrices until the block ends."""

    def __init__(self) -> None:
        self.rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        with torch.no_grad():
            while not self._stop.is_set():
                began = time.perf_counter()
                size = 96 + 32 * (self.rounds % 5)
                noise = torch.rand(size, size)
                torch.relu(noise @ noise).sum()
                self.rounds += 1
                self._stop.wait(time.perf_counter() - began)

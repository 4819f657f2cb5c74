"""Which cached prefixes exist: hashes of granules, chained from the first token on.

A granule is what every pool holds in full pages: a page of keys, or the least common multiple of
that and the chunks of recurrent layers. The key of granule i covers weight version, adapter and all
tokens up to its end, so equal keys mean equal state. Each key lists the requests that hold those
pages; a hit names one of them.
Keys that a running prompt is about to fill are *promised*: a request with the same prefix waits for
them instead of computing them twice.
"""

import hashlib
from collections.abc import Sequence


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], granule: int, *, version: int, adapter: str | None
) -> None:
    """Append the keys that ``keys`` lacks, so that there is one per full granule of ``tokens``."""
    key = keys[-1] if keys else f"{version}/{adapter!r}".encode()
    for start in range(len(keys) * granule, len(tokens) - granule + 1, granule):
        page = ",".join(map(str, tokens[start : start + granule])).encode()
        key = hashlib.blake2b(key + b"|" + page, digest_size=16).digest()
        keys.append(key)


class Prefixes:
    """The cached and the promised granules, by key."""

    def __init__(self) -> None:
        self._holders: dict[bytes, list[str]] = {}
        self._held: dict[str, list[bytes]] = {}
        self._promised: dict[str, set[bytes]] = {}

    def longest(self, keys: Sequence[bytes]) -> tuple[int, str | None]:
        """How many leading granules are cached, and the request that has held them longest."""
        count, holder = 0, None
        for key in keys:
            holders = self._holders.get(key)
            if not holders:
                break
            count, holder = count + 1, holders[0]
        return count, holder

    def is_promised(self, key: bytes) -> bool:
        """Whether a running request is about to fill the page with this key."""
        return any(key in keys for keys in self._promised.values())

    def promise(self, request: str, keys: Sequence[bytes]) -> None:
        """``request`` will fill these pages."""
        self._promised[request] = set(keys)

    def hold(self, request: str, keys: Sequence[bytes]) -> None:
        """``request`` now holds the pages with these keys (all of them, from the first)."""
        held = self._held.setdefault(request, [])
        for key in keys[len(held) :]:
            held.append(key)
            self._holders.setdefault(key, []).append(request)
        if request in self._promised:
            self._promised[request].difference_update(held)

    def drop(self, request: str) -> None:
        """``request`` holds and promises nothing any more."""
        self._promised.pop(request, None)
        for key in self._held.pop(request, ()):
            holders = self._holders[key]
            holders.remove(request)
            if not holders:
                del self._holders[key]

    def clear(self) -> None:
        """Nothing is cached."""
        self._holders.clear()
        self._held.clear()
        self._promised.clear()

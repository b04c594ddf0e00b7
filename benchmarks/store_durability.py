"""What durability costs: the same puts and gets with none, journal and fsync, in turns.

Run: `make bench BENCH=store_durability`. Rows, calls and clock are those of `store.py`.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from store import Ours

from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

MODES = ("none", "journal", "fsync")
TESTS = (("put", 1), ("put", 16), ("put", 256), ("get", 1), ("get", 16), ("get", 256))
ROUNDS = 5


def measure(stores: dict[str, Ours]) -> None:
    found: dict[tuple[str, int, str], list[float]] = {}
    for number in range(ROUNDS + 1):
        for test, batch in TESTS:
            for mode, ours in stores.items():
                value = getattr(ours, test)(batch)
                if number:
                    found.setdefault((test, batch, mode), []).append(value)
    print("rows/s        " + "".join(f"{mode:>12}" for mode in MODES))
    for test, batch in TESTS:
        medians = [statistics.median(found[test, batch, mode]) for mode in MODES]
        print(f"{test} {batch:<10}" + "".join(f"{median:12,.0f}" for median in medians))
    for ours in stores.values():
        ours.store.close()


async def main() -> None:
    async with AsyncExitStack() as stack:
        stores = {}
        for mode in MODES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.cwd())))
            store = ZmqDataStore(
                ZmqOptions(
                    capacity_rows=1 << 20,
                    durability=mode,
                    directory=None if mode == "none" else folder,
                )
            )
            await stack.enter_async_context(store)
            options = store.attach_options()
            stores[mode] = Ours(options["connect"], options["token"])
        await asyncio.to_thread(measure, stores)


if __name__ == "__main__":
    asyncio.run(main())

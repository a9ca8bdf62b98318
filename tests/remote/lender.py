"""``python -m tests.remote.lender HOST:PORT BYTES``: lends memory to a store.

Mooncake has it until stdin ends.
"""

import sys

from mooncake.store import MooncakeDistributedStore

if __name__ == "__main__":
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
    print("lends" if code == 0 else f"failed: {code}", flush=True)
    sys.stdin.read()

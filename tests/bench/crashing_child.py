"""Stands in for the process that measures.

It crashes at the first entry, hangs at the second and finishes the third.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from bench.attention.supervisor import Journal

ENTRIES = ("crashes", "hangs", "works")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    journal = Journal(parser.parse_args().journal)
    known = {line["row"]["system"] for line in journal.news() if "row" in line}
    journal.write(about={"entries": len(ENTRIES), "device": {"kind": "fake"}})
    for name in ENTRIES:
        if name in known:
            continue
        journal.write(begin={"section": "core", "keys": [["case", name]], "doing": "first run"})
        if name == "crashes":
            os._exit(9)
        while name == "hangs":
            time.sleep(0.05)
        journal.write(row={"section": "core", "case": "case", "system": name, "status": "measured"})

"""Reads numbers leased in shards; one has no sample, one kills who reads it: ``poison.py OUT``."""

import ctypes
import os
import sys
from pathlib import Path

from dlrover.data.records import Records

OUT = Path(sys.argv[1])
ROTTEN, DEADLY = 33, 57


class Numbers:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == ROTTEN:
            raise ValueError("rotten")
        if index == DEADLY:
            ctypes.string_at(0)
        return index


data = Records(Numbers(), shard=10, attempts=2)
got = list(data)
data.close()
(OUT / f"got-{os.environ['TORCHELASTIC_RESTART_COUNT']}").write_text(" ".join(map(str, got)))

"""Passes over an expert cache whose reads may fail: each record is right, or there is none and an error says why.

Run: python try_experts.py FOLDER KIND SEED. Prints how many records were right, the errors, and whether the files were
read past the page cache, in JSON.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, cast

from expert_files import ExpertFiles, Kind, write_experts

from edgeinfer.backends.native import _core


def run(files: ExpertFiles, seed: int, n_passes: int = 40) -> dict[str, Any]:
    """See the module."""
    rng = random.Random(seed)
    experts = _core.DiskExperts(files.source, files.bytes_of(rng.randint(2, 12)), 2, rng.randint(1, 4))
    n_right, errors = 0, []
    for _ in range(n_passes):
        experts.begin_pass()
        for layer in files.layers:
            order, _ = experts.begin(layer, rng.sample(range(files.n_experts), rng.randint(1, files.n_experts)))
            experts.hint(rng.choice(files.layers), rng.sample(range(files.n_experts), 2))
            for expert in order:
                record = experts.wait(layer, expert)
                if record is None:
                    break
                if record.tobytes() != files.records[layer, expert]:
                    raise SystemExit(f"layer {layer}, expert {expert}: wrong bytes")
                n_right += 1
                experts.done(layer, expert)
            if experts.error:  # the pass ends
                errors.append(experts.error)
                break
    return {"right": n_right, "errors": errors, "is_direct": experts.is_direct}


if __name__ == "__main__":
    folder, kind, seed = sys.argv[1:]
    print(json.dumps(run(write_experts(Path(folder), cast(Kind, kind)), int(seed))))

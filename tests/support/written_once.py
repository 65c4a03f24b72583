"""Files that tests write again and again are made once in a process."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

_P = ParamSpec("_P")
_MOST_BYTES = 64 << 20  # of all files that are kept


def written_once(write: Callable[Concatenate[Path, _P], Path]) -> Callable[Concatenate[Path, _P], Path]:
    """A function that writes a file whose bytes depend on its arguments, without the path, and on nothing else."""
    contents: OrderedDict[bytes, bytes] = OrderedDict()

    @functools.wraps(write)
    def write_again(path: Path, *args: _P.args, **options: _P.kwargs) -> Path:
        key = pickle.dumps((args, sorted(options.items())))
        if key in contents:
            contents.move_to_end(key)
            path.write_bytes(contents[key])
            return path
        contents[key] = write(path, *args, **options).read_bytes()
        while len(contents) > 1 and sum(map(len, contents.values())) > _MOST_BYTES:
            contents.popitem(last=False)
        return path

    return write_again

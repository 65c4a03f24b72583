"""What lives in one process: engines, sessions, open files."""

from __future__ import annotations

from typing import NoReturn

from edgeinfer.common.errors import NotPicklable


class OfOneProcess:
    """Base of what cannot leave its process: pickle and copy raise NotPicklable, which says what to do instead."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotPicklable(
            f"{type(self).__module__.partition('.')[0]}.{type(self).__name__} holds a model in the memory of its "
            "process and cannot be pickled or copied: load the model in each process that uses it (edgeinfer.load), "
            "and hand over texts, messages or completions"
        )

"""`typing.override`, which Python 3.11 does not have: a method of a base class or protocol, documented there."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import override as override
else:
    Method = TypeVar("Method")

    def override(method: Method) -> Method:
        """The method itself; type checkers compare it with the one that it overrides."""
        return method

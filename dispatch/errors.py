"""Errors of selection. Bad arguments raise ValueError or TypeError instead, before any backend is considered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headmux.contract import Call, Selection


class DispatchError(Exception):
    """Base of every error that choosing a backend raises."""


class UnknownNameError(DispatchError, LookupError):
    """No op or backend has that name; the message lists the known ones and a close match."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnsupportedCallError(DispatchError, NotImplementedError):
    """No allowed backend runs this call.

    Attributes:
        selection: The whole decision; its text is this error's message.
    """

    def __init__(self, selection: Selection) -> None:
        super().__init__(str(selection))
        self.selection = selection

    def __reduce__(self) -> tuple[Any, ...]:
        # kernels and requirements are closures, which do not pickle: names and reasons cross to another process
        s = self.selection
        return (_restored, (s.call, s.source, tuple((b.name, reasons) for b, reasons in s.candidates)))


def _restored(call: Call, source: str, candidates: tuple[tuple[str, tuple[str, ...]], ...]) -> UnsupportedCallError:
    from headmux.contract import Backend, Selection

    found = tuple((Backend(name, {}), reasons) for name, reasons in candidates)
    return UnsupportedCallError(Selection(call, source, found))

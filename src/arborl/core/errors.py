"""Errors a user can mend: one line with what was given, why it cannot work and what is allowed or what to try."""

from collections.abc import Mapping


def shortened(text: str, most: int = 300) -> str:
    """A text of any length, cut to `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its kind if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class InputError(ValueError):
    """A value the user gave that cannot work. Its text is one line: the key, the value, why, what is allowed or what to
    try. `allowed` is what this very key may be, and `cure` what else one can do.
    """

    def __init__(
        self, key: str, value: object, problem: str, allowed: str | None = None, *, cure: str | None = None
    ) -> None:
        shown = shortened(key) if value is None else f"{shortened(key)}={shortened(str(value))}"
        text = f"{shown}: {problem}" + (f"; allowed: {allowed}" if allowed else "") + (f"; try: {cure}" if cure else "")
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))

    @classmethod
    def joined(cls, problems: list[str]) -> "InputError":
        """Several mistakes in one line."""
        error = cls("", None, "")
        error.args = ("; and ".join(dict.fromkeys(problems)),)
        return error


class ArgumentError(InputError):
    """An argument of a function that cannot work. In its texts other arguments stand in {braces}, so that whoever has
    other names for them can put in their own.
    """

    def __init__(
        self, argument: str, value: object, problem: str, allowed: str | None = None, *, cure: str | None = None
    ) -> None:
        self.argument, self.value, self.problem, self.allowed, self.cure = argument, value, problem, allowed, cure
        problem, allowed, cure = self._texts({})
        super().__init__(argument, value, problem, allowed, cure=cure)

    def renamed(self, names: Mapping[str, str]) -> InputError:
        """The same by the names that a user knows."""
        problem, allowed, cure = self._texts(names)
        return InputError(names.get(self.argument, self.argument), self.value, problem, allowed, cure=cure)

    def _texts(self, names: Mapping[str, str]) -> tuple[str, str | None, str | None]:
        allowed, cure = (text and _renamed(text, names) for text in (self.allowed, self.cure))
        return _renamed(self.problem, names), allowed, cure


def _renamed(text: str, names: Mapping[str, str]) -> str:
    for name, other in names.items():
        text = text.replace(f"{{{name}}}", other)
    return text.replace("{", "").replace("}", "")

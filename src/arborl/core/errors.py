class InputError(ValueError):
    """A value the user gave that cannot work. Its text is one line: the key, the value, why, what is allowed."""

    def __init__(self, key: str, value: object, problem: str, allowed: str | None = None) -> None:
        shown = key if value is None else f"{key}={value}"
        text = f"{shown}: {problem}" + (f"; allowed: {allowed}" if allowed else "")
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))

    @classmethod
    def joined(cls, problems: list[str]) -> "InputError":
        """Several mistakes in one line."""
        error = cls("", None, "")
        error.args = ("; and ".join(dict.fromkeys(problems)),)
        return error

def shortened(text: str, most: int = 300) -> str:
    """What is shown of a text that may be of any length."""
    return text if len(text) <= most else text[: most - 1] + "…"


class InputError(ValueError):
    """A value the user gave that cannot work. Its text is one line: the key, the value, why, what is allowed."""

    def __init__(self, key: str, value: object, problem: str, allowed: str | None = None) -> None:
        shown = shortened(key) if value is None else f"{shortened(key)}={shortened(str(value))}"
        text = f"{shown}: {problem}" + (f"; allowed: {allowed}" if allowed else "")
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))

    @classmethod
    def joined(cls, problems: list[str]) -> "InputError":
        """Several mistakes in one line."""
        error = cls("", None, "")
        error.args = ("; and ".join(dict.fromkeys(problems)),)
        return error

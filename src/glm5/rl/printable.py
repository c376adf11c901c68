"""Text that a model wrote, made safe to show."""


def printable(text: str) -> str:
    """`text` with every character escaped that is not printable, and the backslash.

    Control sequences could drive a terminal, and marks of direction change what is read; line
    breaks and tabs are escaped as well, so that the text stays on one line.
    """
    return "".join(_shown(char) for char in text)


def _shown(char: str) -> str:
    if char.isprintable() and char != "\\":
        return char
    return char.encode("unicode_escape").decode("ascii")

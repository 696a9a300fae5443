"""The error of the converter and of the other commands."""


class ConversionError(ValueError):
    """The input is at fault. The message is one line: the file or field, what is wrong with it, and the way out."""

    def __init__(self, message: str):
        # A file name, a value or the error of another library may bring lines of its own.
        super().__init__(" ".join(filter(None, map(str.strip, message.splitlines()))))

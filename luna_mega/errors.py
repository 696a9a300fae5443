"""The error of the converter and of the other commands."""


class ConversionError(ValueError):
    """The input is at fault. The message is one line: the file or field, what is wrong with it, and the way out."""

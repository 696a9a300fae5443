"""The one error of the converter."""


class ConversionError(ValueError):
    """The input is at fault. The message is one line: which file or field, what is wrong, and the way out."""

"""Parts that several tokenizers share."""

from tokenizers import Regex, pre_tokenizers

# White space of Python's `str.split()`, and so of fairseq: it includes the four separators before the space.
_WHITE_SPACE = r"[\s\x1c-\x1f]+"

# Options of all tokenizers but RobertaTokenizer, which has them by default.
OPTIONS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_input_names": ["input_ids", "attention_mask"],
}


def split_at_white_space() -> pre_tokenizers.PreTokenizer:
    """Return the step that splits a text into words as fairseq does."""
    return pre_tokenizers.Split(Regex(_WHITE_SPACE), behavior="removed")

"""Fast tokenizer for whitespace-separated symbols (words, characters, pixel values, operators)."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import TokenizersBackend

from luna_mega.convert.dictionaries import Dictionary, vocabulary
from luna_mega.convert.tokenizers.converted import OPTIONS

# White space of Python's `str.split()`, which fairseq uses, includes the separators 0x1c to 0x1f.
_WHITE_SPACE = r"[\s\x1c-\x1f]+"


def split_at_white_space() -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits a text like fairseq."""
    return pre_tokenizers.Split(Regex(_WHITE_SPACE), behavior="removed")


def word_tokenizer(dictionary: Dictionary, cls_token: str, prepend_cls: bool, max_length: int) -> TokenizersBackend:
    """Return a tokenizer that splits text at white space and looks up every symbol, like fairseq-preprocess.

    A sequence ends with `</s>` and, with `prepend_cls`, starts with `cls_token`. Special tokens must be separate
    symbols.

    Args:
        dictionary: Vocabulary of the model.
        cls_token: Symbol that fairseq appends to the dictionary.
        prepend_cls: Whether sequences start with this symbol.
        max_length: Number of positions of the model.
    """
    vocab = vocabulary(dictionary.symbols, cls_token)
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = split_at_white_space()
    single = f"{cls_token} $A </s>" if prepend_cls else "$A </s>"
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} {single.replace('$A', '$B')}",
        special_tokens=[(token, vocab[token]) for token in (cls_token, "</s>")],
    )
    return TokenizersBackend(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token=cls_token,
        model_max_length=max_length,
        split_special_tokens=True,
        **OPTIONS,
    )

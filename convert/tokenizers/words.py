"""Fast tokenizer for whitespace-separated symbols (words, characters, pixel values, operators)."""

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import TokenizersBackend

from luna_mega.convert.dictionaries import Dictionary, vocabulary
from luna_mega.convert.tokenizers.converted import OPTIONS

# White space of Python's `str.split()`, which fairseq uses, includes the separators 0x1c to 0x1f.
SPLIT = pre_tokenizers.Split(Regex(r"[\s\x1c-\x1f]+"), behavior="removed")


def word_level(dictionary: Dictionary, appended: str | None = None) -> Tokenizer:
    """Return a tokenizer that splits text like fairseq and looks up every symbol."""
    backend = Tokenizer(models.WordLevel(vocabulary(dictionary.symbols, appended), unk_token="<unk>"))
    backend.pre_tokenizer = SPLIT
    return backend


def template(single: str, ids: dict[str, int]) -> processors.TemplateProcessing:
    """Return the processor of a template such as `"$A </s>"`; a pair is two sequences. `ids` are special tokens."""
    pair = f"{single} {single.replace('$A', '$B')}"
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ids.items()))


def wrap(
    backend: Tokenizer, max_length: int | None, make: Callable[..., TokenizersBackend] = TokenizersBackend, **options
) -> TokenizersBackend:
    """Return the tokenizer of transformers with `options`, which encodes special tokens in a text as text."""
    options = OPTIONS | {"model_max_length": max_length} | options
    return make(tokenizer_object=backend, split_special_tokens=True, **options)


def word_tokenizer(dictionary: Dictionary, cls_token: str, prepend_cls: bool, max_length: int) -> TokenizersBackend:
    """Return a tokenizer that splits text at white space and looks up every symbol, like fairseq-preprocess.

    A sequence ends with `</s>` and, with `prepend_cls`, starts with `cls_token`, the symbol that fairseq appends to the
    dictionary. Special tokens must be separate symbols.
    """
    backend = word_level(dictionary, cls_token)
    ids = {token: backend.token_to_id(token) for token in (cls_token, "</s>")}
    backend.post_processor = template(f"{cls_token} $A </s>" if prepend_cls else "$A </s>", ids)
    return wrap(backend, max_length, bos_token="<s>", eos_token="</s>", sep_token="</s>", cls_token=cls_token)

"""Fast tokenizers from SentencePiece BPE models, without the packages sentencepiece and protobuf.

The file is a protocol buffer (`ModelProto` of `sentencepiece_model.proto`); only the necessary fields are read.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import TokenizersBackend
from transformers.convert_slow_tokenizer import generate_merges

from luna_mega.convert.tokenizers.words import template
from luna_mega.errors import ConversionError, shown

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
_BPE = 2  # TrainerSpec.ModelType
_MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}
# Fields of TrainerSpec with the names of special pieces, and their defaults.
_NAMES = {"bos": (46, "<s>"), "eos": (47, "</s>"), "pad": (48, "<pad>")}

Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True)
class PieceModel:
    """A SentencePiece model: text, score and type of every piece in the order of ids, and the normalization."""

    path: Path
    pieces: tuple[tuple[str, float, int], ...]
    names: dict[str, str]
    byte_fallback: bool
    character_map: bytes
    adds_prefix: bool
    removes_spaces: bool

    @property
    def unknown(self) -> str:
        """Return the piece for unknown text."""
        return next(text for text, _, kind in self.pieces if kind == _UNKNOWN)

    def special_ids(self, additional: int) -> dict[str, int | None]:
        """Return the ids of start, end and padding as in the original.

        Without a control piece, they are the first of the `additional` ids after the pieces, or None if there are none.
        """
        ids, next_id = {}, len(self.pieces)
        control = {text: index for index, (text, _, kind) in enumerate(self.pieces) if kind == _CONTROL}
        for role in _NAMES:
            ids[role] = control.get(self.names[role])
            if ids[role] is None and additional:
                ids[role], next_id = next_id, next_id + 1
        return ids


def read_pieces(path: str | Path) -> PieceModel:
    """Read a SentencePiece model."""
    path = Path(path)
    if not path.is_file():
        raise ConversionError(f"{path}: no such file; pass the SentencePiece model, tokenizer.model")
    try:
        model = _fields(path.read_bytes())
        pieces = tuple(map(_piece, model.get(1, [])))
        trainer, normalizer = (_fields(_last(model, number, b"")) for number in (2, 3))
        names = {role: _last(trainer, number, usual.encode()).decode() for role, (number, usual) in _NAMES.items()}
        kind, suffix = _last(trainer, 3, 1), _last(trainer, 24, 0)
        read = PieceModel(
            path,
            pieces,
            names,
            byte_fallback=bool(_last(trainer, 35, 0)),
            character_map=bytes(_last(normalizer, 2, b"")),
            adds_prefix=bool(_last(normalizer, 3, 1)),
            removes_spaces=bool(_last(normalizer, 4, 1)),
        )
    except (ValueError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ConversionError(f"{path}: damaged, or not a SentencePiece model; copy the file again") from error
    if kind != _BPE or suffix:
        what = "with spaces after words" if kind == _BPE else f"of kind {_MODEL_TYPES.get(kind, shown(kind))}"
        raise ConversionError(f"{path}: a SentencePiece model {what}; only byte-pair encoding is converted")
    texts = [text for text, _, _ in pieces]
    if len(set(texts)) != len(texts) or [kind for _, _, kind in pieces].count(_UNKNOWN) != 1 or "" in texts:
        raise ConversionError(f"{path}: its pieces are not unique, or none is for unknown text; copy it again")
    return read


def _fields(message: bytes) -> Fields:
    """Return the fields of a message as a dict: number -> values."""
    fields, place = {}, 0
    while place < len(message):
        key, place = _varint(message, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(message, place)
        elif wire in (1, 2, 5):
            length, place = _varint(message, place) if wire == 2 else (8 if wire == 1 else 4, place)
            value, place = message[place : place + length], place + length
            if place > len(message):
                raise ValueError("a field ends after the message")
        else:
            raise ValueError(f"wire type {wire}")
        fields.setdefault(number, []).append(value)
    return fields


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
    raise ValueError("a number of more than 10 bytes")


def _last(fields: Fields, number: int, default):
    """Return the last value of a field, or the default."""
    value = fields[number][-1] if number in fields else default
    if type(value) is not type(default):
        raise ValueError(f"field {number} has another type")
    return value


def _piece(message: bytes) -> tuple[str, float, int]:
    fields = _fields(message)
    (score,) = struct.unpack("<f", _last(fields, 2, bytes(4)))
    return _last(fields, 1, b"").decode(), score, _last(fields, 3, _NORMAL)


def sentencepiece_tokenizer(model: PieceModel, size: int) -> TokenizersBackend:
    """Return a fast tokenizer with the ids of SentencePiece, which prepends the start token.

    The ids from the number of pieces to `size` are special tokens without a piece, and placeholders. Special tokens in
    a text are encoded as text. The tokenizer has no padding token if the original has none.
    """
    backend = Tokenizer(_byte_pairs(model))
    backend.normalizer = _normalizer(model)
    defined = sorted((text for text, _, kind in model.pieces if kind == _USER_DEFINED), key=len, reverse=True)
    if defined:
        pattern = "|".join("".join(f"\\x{{{ord(c):x}}}" for c in text) for text in defined)
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    fallback, strip = [decoders.ByteFallback()] * model.byte_fallback, [decoders.Strip(" ", 1, 0)] * model.adds_prefix
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *fallback, decoders.Fuse(), *strip])
    ids, texts = model.special_ids(size - len(model.pieces)), [text for text, _, _ in model.pieces]
    for index in range(len(texts), size):
        role = next((role for role, place in ids.items() if place == index), None)
        text = model.names[role] if role else f"<extra_{index}>"
        while text in texts:
            text += "_"
        texts.append(text)
    control = [text for text, _, kind in model.pieces if kind == _CONTROL]
    special = [*control, model.unknown, *texts[len(model.pieces) :]]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    names = {f"{role}_token": texts[place] for role, place in ids.items() if place is not None}
    if bos := names.get("bos_token"):
        backend.post_processor = template(f"{bos} $A", {bos: ids["bos"]})
    return TokenizersBackend(
        tokenizer_object=backend,
        unk_token=model.unknown,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def _byte_pairs(model: PieceModel) -> models.BPE:
    vocabulary = {text: index for index, (text, _, _) in enumerate(model.pieces)}
    merged = {text: score for text, score, kind in model.pieces if kind == _NORMAL}
    fixed = [text for text, _, kind in model.pieces if kind not in (_NORMAL, _UNUSED)]
    return models.BPE(
        vocabulary,
        generate_merges(vocabulary, merged, fixed),
        unk_token=model.unknown,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        ignore_merges=any(kind == _USER_DEFINED for _, _, kind in model.pieces),
    )


def _normalizer(model: PieceModel) -> normalizers.Normalizer:
    """Return the normalizer: character map, removal of spaces, space prefix, replacement of spaces."""
    steps = [normalizers.Precompiled(model.character_map)] if model.character_map else []
    if model.removes_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])

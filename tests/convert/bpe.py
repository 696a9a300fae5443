"""Byte-pair encoding in plain Python: GPT-2's encoder.py with a fairseq dictionary, and subword-nmt's apply_bpe.py."""

import json
from math import inf

import regex
from transformers import RobertaTokenizer

WORDS = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")
MERGES = ["Ġ t", "h e", "Ġt he", "a b", "ab c", "b c", "c a", "Ġ ab", "Ã ©", "abc ab", "Ġ Ġ", "Ġt h"]


def byte_alphabet():
    """Return the characters that GPT-2 uses for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return dict(zip(shown + hidden, map(chr, shown + [256 + n for n in range(len(hidden))]), strict=True))


def merge(pieces, ranks):
    """Return the pieces after all merges, first of the pair with the lowest rank."""
    while len(pieces) > 1:
        pair = min(zip(pieces, pieces[1:], strict=False), key=lambda pair: ranks.get(pair, inf))
        if pair not in ranks:
            break
        merged, at = [], 0
        while at < len(pieces):
            here = tuple(pieces[at : at + 2]) == pair
            merged.append("".join(pair) if here else pieces[at])
            at += 2 if here else 1
        pieces = merged
    return pieces


def segment(word, merges):
    """Return the pieces of a word as `encode` of subword-nmt (version 0.2) does; the last one ends with `</w>`."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    return merge([*word[:-1], f"{word[-1]}</w>"], ranks)


class Gpt2:
    """Split texts into GPT-2's pieces; return the pieces, their ids, their character ranges, or their text."""

    def __init__(self, merges):
        self.alphabet = byte_alphabet()
        self.ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
        pieces = [*self.alphabet.values(), *("".join(pair) for pair in self.ranks)]
        self.number = {piece: str(index) for index, piece in enumerate(pieces)}
        self.seen = {}
        names = ["<s>", "<pad>", "</s>", "<unk>", *pieces, "<mask>"]  # for the character ranges of pieces
        self.roberta = RobertaTokenizer({name: index for index, name in enumerate(names)}, list(self.ranks))

    def pieces(self, text):
        found = []
        for word in WORDS.findall(text):
            if word not in self.seen:
                self.seen[word] = self.bpe(word)
            found += self.seen[word]
        return found

    def bpe(self, word):
        return merge([self.alphabet[byte] for byte in word.encode()], self.ranks)

    def encode(self, symbols, texts):
        """Return the ids that fairseq's `encode` and a dictionary of these symbols assign to the texts."""
        index = {symbol: 4 + line for line, symbol in enumerate(symbols)}
        return [[0, *(index.get(self.number[piece], 3) for piece in self.pieces(text)), 2] for text in texts]

    def decode(self, names):
        """Return the text of pieces and special tokens."""
        byte = {character: byte for byte, character in self.alphabet.items()}
        parts = [bytes(map(byte.get, name)) if name in self.number else name.encode() for name in names]
        return b"".join(parts).decode("utf-8", "replace")


def write_bpe(folder, merges=MERGES):
    """Write GPT-2's files `encoder.json` and `vocab.bpe` with these merges."""
    folder.mkdir()
    pieces = [*Gpt2(merges).number, "<|endoftext|>"]
    encoder = json.dumps({piece: index for index, piece in enumerate(pieces)})
    (folder / "encoder.json").write_text(encoder, encoding="utf-8")
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder

"""GPT-2's byte-pair encoding in plain Python, as in its encoder.py, and ids of its pieces from a fairseq dictionary."""

import regex

WORDS = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


def byte_alphabet():
    """Return the characters that GPT-2 uses for the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return dict(zip(shown + hidden, map(chr, shown + [256 + n for n in range(len(hidden))]), strict=True))


class Gpt2:
    """Split texts into GPT-2's pieces; return the pieces, their ids, or their character ranges."""

    def __init__(self, merges):
        self.alphabet = byte_alphabet()
        self.ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
        pieces = [*self.alphabet.values(), *("".join(pair) for pair in self.ranks)]
        self.number = {piece: str(index) for index, piece in enumerate(pieces)}
        self.seen = {}

    def pieces(self, text):
        found = []
        for word in WORDS.findall(text):
            if word not in self.seen:
                self.seen[word] = self.bpe(word)
            found += self.seen[word]
        return found

    def bpe(self, word):
        symbols = [self.alphabet[byte] for byte in word.encode()]
        while len(symbols) > 1:
            pair = min(zip(symbols, symbols[1:], strict=False), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if pair not in self.ranks:
                break
            merged, at = [], 0
            while at < len(symbols):
                here = tuple(symbols[at : at + 2]) == pair
                merged.append("".join(pair) if here else symbols[at])
                at += 2 if here else 1
            symbols = merged
        return symbols

    def offsets(self, text):
        """Return the character range of every piece, without spaces at both ends."""
        of_byte = [at for at, character in enumerate(text) for _ in character.encode()]
        ranges, start = [], 0
        for piece in self.pieces(text):
            end = start + len(piece)
            first, last = of_byte[start], of_byte[end - 1] + 1
            start = end
            while first < last and text[first] == " ":
                first += 1
            while last > first and text[last - 1] == " ":
                last -= 1
            ranges.append((first, last))
        return ranges

    def encode(self, symbols, texts):
        """Return the ids that fairseq's `encode` and a dictionary of these symbols assign to the texts."""
        index = {symbol: 4 + line for line, symbol in enumerate(symbols)}
        return [[0, *(index.get(self.number[piece], 3) for piece in self.pieces(text)), 2] for text in texts]

"""Adaptive input embeddings (Baevski and Auli 2019) and adaptive softmax (Grave et al. 2017) of the language models.

The cutoffs divide the vocabulary, sorted by frequency, into bands. Tokens of band b have embeddings of size
`embedding_size / factor^b`. The softmax scores the tokens of the first band (head) together with one class for each
other band (tail).
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.for_models import upcast


def check_bands(config: PreTrainedConfig) -> None:
    """Raise `ValueError` for invalid cutoffs, factors or ties of a `MegaConfig`."""
    cutoffs = {"adaptive_input": config.adaptive_input_cutoffs, "adaptive_softmax": config.adaptive_softmax_cutoffs}
    widths = {"adaptive_input": config.embedding_size, "adaptive_softmax": config.hidden_size}
    for field, given in cutoffs.items():
        if given is None:
            continue
        edges = [0, *given, config.vocab_size]
        if len(edges) < 3 or sorted(set(edges)) != edges:
            raise ValueError(
                f"{field}_cutoffs must increase strictly between 0 and vocab_size={config.vocab_size}, got {given}"
            )
        factor, width = getattr(config, f"{field}_factor"), widths[field]
        if factor < 1 or width // factor ** len(given) < 1:
            raise ValueError(
                f"{field}_factor must leave the last of {len(given) + 1} bands one of {width} features, got {factor}"
            )
    adaptive = any(given is not None for given in cutoffs.values())
    if adaptive and config.tie_word_embeddings and cutoffs["adaptive_input"] != cutoffs["adaptive_softmax"]:
        raise ValueError(
            f"tie_word_embeddings=True requires equal cutoffs, got adaptive_input_cutoffs={cutoffs['adaptive_input']} "
            f"and adaptive_softmax_cutoffs={cutoffs['adaptive_softmax']}; pass tie_word_embeddings=False to untie them"
        )
    if config.tie_adaptive_projections and not (adaptive and config.tie_word_embeddings):
        raise ValueError("tie_adaptive_projections=True requires an adaptive softmax and tie_word_embeddings=True")


def _bands(cutoffs: list[int], vocab_size: int, width: int, factor: float) -> tuple[list[int], list[int]]:
    """Return the bounds of the bands, `[0, ..., vocab_size]`, and the embedding size of each band."""
    edges = [0, *cutoffs, vocab_size]
    return edges, [int(width // factor**band) for band in range(len(edges) - 1)]


class _Words(nn.Embedding):
    """Embedding matrix of a band.

    `forward` returns the embeddings of tokens or, if `score`, the scores `[M, words]` of states `[M, width]`. One
    method computes both, because FSDP and offloading load the weights of a module only during its `forward`.
    """

    def forward(self, input: torch.Tensor, score: bool = False) -> torch.Tensor:
        return linear(input, self.weight) if score else super().forward(input)


class MegaBandProjection(nn.Module):
    """Projection from the embedding size of a band to the hidden size, or `back`.

    Not an `nn.Linear`: adapters and quantization would change only one of the two directions.
    """

    def __init__(self, width: int, model_width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model_width, width))

    def forward(self, vectors: torch.Tensor, back: bool = False) -> torch.Tensor:
        return linear(vectors, self.weight.T if back else self.weight)


class MegaAdaptiveEmbedding(nn.Module):
    """Adaptive embedding of tokens, `[B, T]` to `[B, T, d]`: the embedding of a band, then its projection."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.width = config.hidden_size
        self.edges, widths = _bands(
            config.adaptive_input_cutoffs, config.vocab_size, config.embedding_size, config.adaptive_input_factor
        )
        sizes = [end - start for start, end in pairwise(self.edges)]
        self.words = nn.ModuleList(_Words(size, width) for size, width in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(MegaBandProjection(width, self.width) for width in widths)

    def forward(self, inputs: torch.Tensor, band: int | None = None, dropout: nn.Module | None = None) -> torch.Tensor:
        """Return the embeddings of tokens, or with `band` the scores of all words of a band.

        Args:
            inputs: `[B, T]` token ids. With `band`, states `[M, width of the band]`, or with `dropout` `[M, d]`.
            band: The band whose words are scored.
            dropout: If given, states are projected back to the width of the band, then dropped out.
        """
        if band is not None:
            if dropout is not None:
                inputs = dropout(self.projections[band](inputs, back=True))
            return self.words[band](inputs, score=True)
        bands = zip(pairwise(self.edges), self.words, self.projections, strict=True)
        embedded = inputs.new_zeros(*inputs.shape, self.width, dtype=next(self.projections.parameters()).dtype)
        for index, ((start, end), words, projection) in enumerate(bands):
            # Invalid ids are in the first or last band, so that `nn.Embedding` raises the error.
            inside = torch.ones_like(inputs, dtype=torch.bool) if index == 0 else inputs >= start
            if index < len(self.words) - 1:
                inside = inside & (inputs < end)
            embedded = embedded.index_put((inside,), projection(words(inputs[inside] - start)).to(embedded.dtype))
        return embedded


class MegaAdaptiveSoftmax(nn.Module):
    """Adaptive softmax over hidden states `[M, d]`.

    If `tie_word_embeddings` is True, the word embeddings are shared with the `MegaAdaptiveEmbedding` whose `__call__`
    is passed as `embedding`. If `tie_adaptive_projections` is True, so are the transposed projections of the tails.
    Tied weights are not parameters of this module.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.tied, width = config.tie_word_embeddings, config.hidden_size
        if self.tied:
            factor, inner = config.adaptive_input_factor, config.embedding_size
        else:
            factor, inner = config.adaptive_softmax_factor, width
        self.edges, widths = _bands(config.adaptive_softmax_cutoffs, config.vocab_size, inner, factor)
        # The original loss ignores the token of each tail whose index within the tail is the padding token of fairseq.
        self.left_out = 1 if config.legacy_adaptive_loss else -100
        self.dropout = nn.Dropout(config.adaptive_softmax_dropout)
        first, *sizes = (end - start for start, end in pairwise(self.edges))
        self.head = nn.Linear(width, len(sizes) if self.tied else first + len(sizes), bias=False)
        project_head = self.tied and inner != width
        self.head_projection = nn.Linear(width, inner, bias=False) if project_head else None
        self.projections = self.words = None
        if not (self.tied and config.tie_adaptive_projections):
            self.projections = nn.ModuleList(nn.Linear(width, tail, bias=False) for tail in widths[1:])
        if not self.tied:
            shapes = zip(widths[1:], sizes, strict=True)
            self.words = nn.ModuleList(nn.Linear(tail, size, bias=False) for tail, size in shapes)

    def score_head(self, states: torch.Tensor, embedding: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the float32 scores of the words of the first band and of the tails, `[M, size + tails]`."""
        if not self.tied:
            return upcast(self.head(states))
        projected = states if self.head_projection is None else self.head_projection(states)
        return upcast(torch.cat((embedding(projected, 0), self.head(states)), dim=-1))

    def score_tail(self, tail: int, states: torch.Tensor, embedding: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the float32 scores of the words of a tail, `[M, size]`."""
        if self.projections is None:
            return upcast(embedding(states, tail + 1, self.dropout))
        projected = self.dropout(self.projections[tail](states))
        if self.words is None:
            return upcast(embedding(projected, tail + 1))
        return upcast(self.words[tail](projected))

    def forward(self, states: torch.Tensor, embedding: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the float32 log-probabilities of all tokens, `[M, vocab_size]`."""
        states, first = self.dropout(states), self.edges[1]
        head = self.score_head(states, embedding).log_softmax(dim=-1)
        tails = (
            self.score_tail(tail, states, embedding).log_softmax(dim=-1) + head[:, first + tail, None]
            for tail in range(len(self.edges) - 2)
        )
        return torch.cat((head[:, :first], *tails), dim=-1)

    def loss(self, states: torch.Tensor, targets: torch.Tensor, embedding: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the summed negative log-likelihood of `targets` `[M]`. A tail is computed only for its own targets."""
        states, first = self.dropout(states), self.edges[1]
        classes = targets
        total: torch.Tensor | float = 0.0
        for tail, (start, end) in enumerate(pairwise(self.edges[1:])):
            inside = (targets >= start) & (targets < end)
            classes = classes.masked_fill(inside, first + tail)
            scores, chosen = self.score_tail(tail, states[inside], embedding), targets[inside] - start
            total = total + cross_entropy(scores, chosen, ignore_index=self.left_out, reduction="sum")
        return total + cross_entropy(self.score_head(states, embedding), classes, reduction="sum")

"""What the plans of Luna's and Mega's encoder-decoders have in common."""

from typing import Any

from luna_mega.convert.evidence import Evidence, same_bits

_LONGEST = 200


def generation(positions: int) -> dict[str, Any]:
    """What `fairseq-generate` does without options, for `generate`; a target has at most `positions` - 1 tokens."""
    return {
        "num_beams": 5,
        "length_penalty": 1.0,
        "early_stopping": True,
        "min_new_tokens": 1,
        "suppress_tokens": [1],
        "forced_eos_token_id": 2,
        "max_length": min(_LONGEST, positions - 1) + 2,  # and the start and end of a sentence
    }


def sharing(evidence: Evidence) -> dict[str, bool]:
    """Which of the three matrices of words are one."""
    tensors, args = evidence.tensors, evidence.args
    evidence.shape("decoder.output_projection.weight", "vocabulary", "width")
    names = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    source, target, output = (tensors[f"{name}.weight"] for name in names)
    asked = [args.get(name) for name in ("share_all_embeddings", "share_decoder_input_output_embed")]
    tied = same_bits(target, output)
    if any(asked) and not tied:
        name = "share_all_embeddings" if asked[0] else "share_decoder_input_output_embed"
        evidence.prefer(name, False)
    tied = tied and asked != [False, False]
    joint = tied and same_bits(source, target) and asked[0] is not False
    if asked[0] and tied and not joint:
        evidence.prefer("share_all_embeddings", False)
    return {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": joint}

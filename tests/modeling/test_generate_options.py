"""Every option of `generate` works, has no effect or raises an error, with every model.

The expected results are the table of docs/generation.md. Options added by a new transformers version fail here until
they have a row.
"""

import copy
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CompileConfig, GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, TextStreamer
from transformers.generation import MaxLengthCriteria, SuppressTokensLogitsProcessor

from tests.modeling.decoders import PLAIN, make_plain, padded, prompt, with_each

PAGE = Path(__file__).parents[2] / "docs" / "generation.md"
KINDS = ["decoders", "encoder-decoders"]
# Arguments of `generate` that are not fields of `GenerationConfig`.
MORE_ARGUMENTS = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}
STOPS = {"eos_token_id": [*range(5), *range(7, 262)]}  # all tokens except two end a text


def byte_tokenizer():
    """Return a tokenizer in which each byte is a token, and "ab" and "abc" are tokens too."""
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [("a", "b"), ("ab", "c")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


TOKENIZER = byte_tokenizer()


class Run:
    """One call of `generate` with an option; its methods check the result."""

    def __init__(self, model, options):
        self.model, options = model, {"max_new_tokens": 5, **options}
        length = options.pop("prompt", 7)
        ids, mask = (x[:, -length:] for x in padded([7, 3], 7, "left"))
        self.inputs = prompt(model, ids, mask) | options
        if "streamer" in options:
            self.inputs["streamer"] = Shown()
        settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        if "generation_config" in options:  # transformers deprecates passing other options together with it
            settings |= {name: self.inputs.pop(name) for name in ("max_new_tokens", "use_cache")}
            self.inputs["generation_config"] = copy.deepcopy(options["generation_config"])
            self.inputs["generation_config"].update(**settings)
            settings = {}
        torch.manual_seed(0)
        self.output = model.generate(**self.inputs, **settings)
        self.sequences = self.output.sequences
        self.new = self.sequences[:, 1 if model.config.is_encoder_decoder else ids.shape[1] :]

    @property
    def scored(self):
        """Return whether the option changed the logits."""
        return not torch.equal(torch.stack(self.output.scores), torch.stack(self.output.logits))

    def check_logits(self):
        """Check that the logits of every step equal those of one call on the complete sequence."""
        inputs = {name: self.inputs[name] for name in ("input_ids", "attention_mask")}
        rows = len(self.sequences) // len(inputs["input_ids"])
        inputs = {name: value.repeat_interleave(rows, 0) for name, value in inputs.items()}
        length = self.new.shape[1]
        if self.model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = self.sequences
        else:
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(self.new)], 1)
            inputs = {"input_ids": self.sequences, "attention_mask": mask}
        complete = self.model(**inputs, use_cache=False).logits[:, -length - 1 : -1]
        steps = torch.stack(self.output.logits, 1)
        torch.testing.assert_close(steps, complete.to(steps.dtype), atol=1e-5, rtol=1e-5)


def guided(run):
    """Return whether the scores depend on the complete prompt, not only on its last token."""
    ids, mask = run.inputs["input_ids"], torch.ones(2, 1).long()
    bare = torch.cat([ids[:, -1:], run.new[:, :-1]], 1)
    without = run.model(bare, mask.expand_as(bare)).logits.log_softmax(-1)
    with_prompt = torch.stack(run.output.logits, 1).log_softmax(-1)
    expected = 1.5 * (with_prompt - without) + without
    torch.testing.assert_close(torch.stack(run.output.scores, 1).double(), expected.double(), atol=1e-5, rtol=1e-5)
    return True


def healed(run):
    """Return whether the last token of the prompt was replaced by one that starts with "a"."""
    assert run.inputs["input_ids"][0, -1] == TOKENIZER.convert_tokens_to_ids("a")
    return TOKENIZER.convert_ids_to_tokens(run.sequences[0, 3].item()) in ("ab", "abc", "a")


def began(run):
    """Return whether generation works without a prompt, or with a source of one token."""
    complete = run.model.generate(bos_token_id=5, max_new_tokens=3)
    return complete[0, 0] == (run.model.config.decoder_start_token_id if run.model.config.is_encoder_decoder else 5)


def positional(run):
    """Return whether the prompt may be the first argument."""
    mask = run.inputs["attention_mask"]
    return run.model.generate(run.inputs["input_ids"], attention_mask=mask, max_new_tokens=5).equal(run.sequences)


def attended(run):
    """Return whether there are weights for each step and layer; Mega returns weights only without a cache."""
    weights = run.output.get("decoder_attentions") or run.output.attentions
    return len(weights) == 5 and len(weights[0]) == run.model.config.num_hidden_layers and weights[0][0].dim() >= 4


class Shown(TextStreamer):
    """A streamer that stores its inputs."""

    def __init__(self):
        self.shown = []

    def put(self, value):
        self.shown += value.flatten().tolist()

    def end(self):
        self.shown.append("end")


def streamed(run):
    shown = run.inputs["streamer"].shown
    return shown[-1] == "end" and shown[-11:-1] == run.new.T.flatten().tolist()


def is_static(run):
    return run.output["cache"].is_static


def own_loop(run):
    """Return whether a custom loop of one step, given the prompt and the model's cache, matches the run."""

    def step(model, input_ids, logits_processor, stopping_criteria, generation_config, **given):
        inputs = model.prepare_inputs_for_generation(input_ids, **given)
        return torch.cat([input_ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)

    one = run.model.generate(**run.inputs, custom_generate=step)
    return torch.equal(one, run.sequences[:, : one.shape[1]])


SAMPLED = {"do_sample": True}
BEAMS = {"num_beams": 3}
# Option -> argument and check of the result. None: only equality with and without a cache is checked.
WORKS = {
    "max_length": ({"max_length": 12, "max_new_tokens": None}, lambda run: run.sequences.shape[1] == 12),
    "max_new_tokens": ({"max_new_tokens": 3}, lambda run: run.new.shape[1] == 3),
    "min_length": ({**STOPS, "min_length": 11, "max_new_tokens": 12}, lambda run: run.sequences.shape[1] >= 11),
    "min_new_tokens": ({**STOPS, "min_new_tokens": 4}, lambda run: run.new.shape[1] >= 4),
    "early_stopping": ({**BEAMS, "early_stopping": True}, None),
    "max_time": ({"max_time": 1e-9}, lambda run: run.new.shape[1] == 1),
    "stop_strings": (
        {"stop_strings": ["z"], "tokenizer": TOKENIZER, "sequence_bias": {(TOKENIZER.vocab["z"],): 1e4}},
        lambda run: run.new.shape[1] == 1,
    ),
    "do_sample": ({**SAMPLED, "temperature": 50.0}, lambda run: run.scored),
    "num_beams": (BEAMS, lambda run: run.output.sequences_scores is not None),
    "use_cache": ({}, lambda run: "cache" in run.output or not run.inputs["use_cache"]),
    "temperature": ({**SAMPLED, "temperature": 0.5}, lambda run: run.scored),
    "top_k": ({**SAMPLED, "top_k": 2}, lambda run: run.scored),
    "top_p": ({**SAMPLED, "top_p": 0.5}, lambda run: run.scored),
    "min_p": ({**SAMPLED, "min_p": 0.9}, lambda run: run.scored),
    "top_h": ({**SAMPLED, "top_h": 0.5}, lambda run: run.scored),
    "typical_p": ({**SAMPLED, "typical_p": 0.5}, lambda run: run.scored),
    "epsilon_cutoff": ({**SAMPLED, "epsilon_cutoff": 0.5}, lambda run: run.scored),
    "eta_cutoff": ({**SAMPLED, "eta_cutoff": 0.5}, lambda run: run.scored),
    "repetition_penalty": ({"repetition_penalty": 1.5}, lambda run: run.scored),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 1.5}, lambda run: run.scored),
    "length_penalty": ({**BEAMS, "length_penalty": 2.0}, None),
    "no_repeat_ngram_size": (
        {"no_repeat_ngram_size": 1},
        lambda run: all(len(set(row)) == 5 for row in run.new.tolist()),
    ),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, lambda run: run.scored),
    "bad_words_ids": ({"bad_words_ids": [[5]]}, lambda run: run.scored),
    "renormalize_logits": ({"renormalize_logits": True}, lambda run: run.scored),
    "forced_bos_token_id": ({"forced_bos_token_id": 6, "prompt": 1}, lambda run: (run.new[:, 0] == 6).all()),
    "forced_eos_token_id": ({"forced_eos_token_id": 6}, lambda run: (run.new[:, -1] == 6).all()),
    "remove_invalid_values": (
        {"sequence_bias": {(5,): float("inf")}, "remove_invalid_values": True},
        lambda run: torch.stack(run.output.scores).isfinite().all(),
    ),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (1, 3.0)}, lambda run: run.scored),
    "suppress_tokens": ({"suppress_tokens": [5]}, lambda run: run.scored),
    "begin_suppress_tokens": ({"begin_suppress_tokens": [5]}, lambda run: run.scored),
    "sequence_bias": ({"sequence_bias": {(5,): 1e4}}, lambda run: (run.new == 5).all()),
    "token_healing": (
        {**TOKENIZER(["xyza"], return_tensors="pt"), "token_healing": True, "tokenizer": TOKENIZER},
        healed,
    ),
    "guidance_scale": ({"guidance_scale": 1.5}, guided),
    "watermarking_config": ({"watermarking_config": {"bias": 2.5}}, lambda run: run.scored),
    "num_return_sequences": ({**SAMPLED, "num_return_sequences": 2}, lambda run: len(run.sequences) == 4),
    "output_attentions": ({"output_attentions": True}, attended),
    "output_hidden_states": (
        {"output_hidden_states": True},
        lambda run: len(run.output.get("decoder_hidden_states") or run.output.hidden_states) == 5,
    ),
    "output_scores": ({}, lambda run: len(run.output.scores) == 5),
    "output_logits": ({}, lambda run: len(run.output.logits) == 5),
    "return_dict_in_generate": ({}, lambda run: run.output.keys() >= {"sequences"}),
    "pad_token_id": (
        {"eos_token_id": 6, "pad_token_id": 4, "prefix_allowed_tokens_fn": lambda row, ids: [8] if row else [6]},
        lambda run: run.new.tolist() == [[6, 4, 4, 4, 4], [8] * 5],
    ),
    "bos_token_id": ({}, began),
    "eos_token_id": ({**STOPS}, lambda run: run.new.shape[1] < 5 or (run.new < 7).any()),
    "decoder_start_token_id": ({"decoder_start_token_id": [5, 6]}, lambda run: run.sequences[:, 0].tolist() == [5, 6]),
    "prefill_chunk_size": ({"prefill_chunk_size": 3}, None),
    "inputs": ({}, positional),
    "generation_config": ({"generation_config": GenerationConfig(suppress_tokens=[5])}, lambda run: run.scored),
    "logits_processor": ({"logits_processor": [SuppressTokensLogitsProcessor([5])]}, lambda run: run.scored),
    "stopping_criteria": (
        {"stopping_criteria": [MaxLengthCriteria(3)]},
        lambda run: run.sequences.shape[1] == max(3, run.sequences.shape[1] - run.new.shape[1] + 1),
    ),
    "prefix_allowed_tokens_fn": (
        {"prefix_allowed_tokens_fn": lambda row, ids: [5, 9]},
        lambda run: set(run.new.flatten().tolist()) <= {5, 9},
    ),
    "synced_gpus": ({"synced_gpus": True}, None),
    "streamer": ({"streamer": None}, streamed),
    "negative_prompt_ids": (
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 8], [9, 7]])},
        lambda run: run.scored,
    ),
    "negative_prompt_attention_mask": (
        {
            "guidance_scale": 1.5,
            "negative_prompt_ids": torch.tensor([[1, 8], [9, 7]]),
            "negative_prompt_attention_mask": torch.tensor([[0, 1], [1, 1]]),
        },
        lambda run: run.scored,
    ),
    "tokenizer": ({"tokenizer": TOKENIZER}, None),
    "custom_generate": ({}, own_loop),
    "cache_implementation": ({"cache_implementation": "static"}, is_static),
    "max_cache_len": ({"cache_implementation": "static", "max_cache_len": 40}, is_static),
}
_ASSISTED = "assisted generation is not supported with stateful models"
_FETCHED = "requires `trust_remote_code=True`"
_OWN = "has its own cache; omit the argument, or pass cache_implementation='static'"
_ALONE = "is not supported by encoder-decoders"
ASSISTED = {"use_mtp": True, "prompt_lookup_num_tokens": 2, "assistant_early_exit": 1, "num_assistant_tokens": 3}
ASSISTED |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.3}
ASSISTED |= {"assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5}
ASSISTED |= {"speculation_type": "dflash"}
# Option -> argument and error message, for decoders and encoder-decoders.
UNSUPPORTED = {
    **{name: ({name: value}, _ASSISTED) for name, value in ASSISTED.items()},
    "quantized cache": ({"cache_implementation": "quantized"}, _OWN),
    "cache_config": ({"cache_config": {"nbits": 4}}, _OWN),
    "length of a dynamic cache": ({"max_cache_len": 40}, "max_cache_len=40 requires cache_implementation='static'"),
    "static without a cache": ({"cache_implementation": "static", "use_cache": False}, "requires use_cache=True"),
    "compile_config": ({"compile_config": CompileConfig()}, "`compile_config` is not supported"),
    "continuous_batching_config": ({"cache_implementation": "paged"}, "continuous batching"),
    "is_assistant": ({"is_assistant": True}, "cannot be an assistant model"),
    "max_matching_ngram_size": ({"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 2}, _ASSISTED),
    "assistant_model": ({}, _ASSISTED),
    "assistant_tokenizer": ({"assistant_tokenizer": TOKENIZER, "tokenizer": TOKENIZER}, _ASSISTED),
    "penalty_alpha": ({"penalty_alpha": 0.5, "top_k": 4}, _FETCHED),
    "low_memory": ({"penalty_alpha": 0.5, "top_k": 4, "low_memory": True}, _FETCHED),
    "dola_layers": ({"dola_layers": "high"}, _FETCHED),
    "num_beam_groups": ({"num_beams": 4, "num_beam_groups": 2}, _FETCHED),
    "diversity_penalty": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, _FETCHED),
    "constraints": ({"num_beams": 3, "constraints": [1]}, _FETCHED),
    "force_words_ids": ({"num_beams": 3, "force_words_ids": [[5]]}, _FETCHED),
}
DECODER_ONLY = ["guidance_scale", "negative_prompt_ids", "negative_prompt_attention_mask", "prefill_chunk_size"]
DECODER_ONLY += ["token_healing"]
NO_EFFECT = {
    "disable_compile": {"disable_compile": True},
    "trust_remote_code": {"trust_remote_code": True},
    "transformers_version": {"transformers_version": "5"},
    "decoder_start_token_id": {"decoder_start_token_id": 5},  # changes results only in encoder-decoders
}


MODELS = [f"{family} {KINDS[encoded]}" for family, encoded in PLAIN]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    family, encoded = PLAIN[MODELS.index(request.param)]
    return make_plain(family, is_encoder_decoder=encoded, vocab_size=len(TOKENIZER), num_hidden_layers=1)


@pytest.fixture
def process_group():
    """Create a process group that contains only this process; `synced_gpus` requires one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@torch.no_grad()
@pytest.mark.parametrize("name, model", with_each(WORKS, MODELS, slow=1, weekly=True), indirect=["model"])
def test_works(model, name, request):
    """The option has an effect, which does not depend on the cache; every step has the model's logits."""
    if name in (DECODER_ONLY if model.config.is_encoder_decoder else NO_EFFECT):
        return
    if name == "synced_gpus":
        request.getfixturevalue("process_group")
    options, shows = WORKS[name]
    uncached = name not in ("prefill_chunk_size", "cache_implementation", "max_cache_len")  # require a cache
    cached = not (name == "output_attentions" and model.config.model_type.startswith("mega"))
    runs = [Run(model, options | {"use_cache": use}) for use in (True, False) if (cached if use else uncached)]
    for run in runs:
        assert shows is None or shows(run)
        assert torch.equal(run.sequences, runs[0].sequences)
        if run.output.get("beam_indices") is None and name not in ("token_healing", "forced_bos_token_id"):
            run.check_logits()


@torch.no_grad()
def test_unsupported_options_raise(model):
    for name, (options, reason) in UNSUPPORTED.items():
        if reason == _ASSISTED and not options.keys() & {"use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit"}:
            options = options | {"assistant_model": model}
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(reason)) as error:
            Run(model, options)
        assert "\n" not in str(error.value).strip(), name
    if model.config.is_encoder_decoder:
        for name in DECODER_ONLY:
            with pytest.raises(ValueError, match=_ALONE):
                Run(model, WORKS[name][0] | {"input_ids": torch.full((2, 3), 5)})
    else:
        with pytest.raises(ValueError, match="`guidance_scale` is not supported with num_beams=2: .*; omit one"):
            Run(model, {"guidance_scale": 1.5, "num_beams": 2})
        if model.config.model_type.startswith("mega"):
            with pytest.raises(ValueError, match="`output_attentions=True` requires a new cache"):
                Run(model, {"output_attentions": True})


@torch.no_grad()
@pytest.mark.parametrize("model", [MODELS[0], MODELS[-1]], indirect=True)
def test_no_effect(model):
    plain = Run(model, {})
    for name, options in NO_EFFECT.items():
        if not (name in WORKS and model.config.is_encoder_decoder):
            assert torch.equal(Run(model, options).sequences, plain.sequences), name


def rows():
    """Return the table of the page as a dict: option -> support by decoders and by encoder-decoders."""
    verdicts = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            verdicts |= {
                name: [re.match("works|error|no effect", cell)[0] for cell in cells]
                for name in re.findall(r"`(\w+)`", names)
            }
    return verdicts


def test_page_has_every_option():
    """The page has exactly one row for each option of the installed transformers version."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = {*inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
    assert rows().keys() == fields | arguments | MORE_ARGUMENTS


def test_page_lists_the_tested_options():
    for name, (decoder, with_encoder) in rows().items():
        assert (decoder == "error") == (name in UNSUPPORTED), name
        assert (with_encoder == "error") == (name in UNSUPPORTED or name in DECODER_ONLY), name
        assert (decoder == "no effect") == (name in NO_EFFECT) and (
            decoder == "works" or name not in WORKS or name in NO_EFFECT
        ), name
        assert (with_encoder == "works") == (name in WORKS and name not in DECODER_ONLY), name

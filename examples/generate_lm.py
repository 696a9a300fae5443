"""Generate text of any length with a causal language model.

    python examples/generate_lm.py --model_name_or_path OUT --prompt "ROMEO:" --max_new_tokens 20000 --output_dir TEXT

Print the text and, at regular intervals on the standard error, speed and cache size. Both are constant for Luna, and
for Mega with chunked attention.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TextStreamer, set_seed
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class Arguments:
    model_name_or_path: str = HfArg(help="folder or Hub name of the model")
    prompt: str = HfArg(help="prompt of the text")
    output_dir: str = HfArg(help="output folder for text.txt and speed.json")
    line_end: str | None = HfArg(default=None, help="separator: newline, or eos (</s>); default: the model's, or eos")
    max_new_tokens: int = HfArg(default=1000, help="number of tokens to generate")
    temperature: float = HfArg(default=1.0, help="sampling temperature; 0 = greedy decoding")
    top_k: int = HfArg(default=0, help="sample from the k most likely tokens; 0 = from all")
    report_every: int = HfArg(default=1000, help="number of tokens between two reports of speed and cache size")
    seed: int = 42
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class MeasuredStreamer(TextStreamer):
    """Streamer that prints the text, writes it to a file, and reports speed and cache size at regular intervals.

    The token `line_end` is printed as a newline; -1 = none.
    """

    def __init__(self, tokenizer, file, every: int, line_end: int):
        super().__init__(tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.file, self.every, self.line_end = file, every, line_end
        self.count, self.reports, self.start = 0, [], None

    def save_cache(self, module, arguments, output):  # a forward hook
        self.cache = output["cache"]

    def put(self, value: torch.Tensor):
        *lines, last = torch.tensor_split(value.flatten(), (value.flatten() == self.line_end).nonzero().flatten() + 1)
        for line in lines:
            text = self.tokenizer.decode([*self.token_cache, *line.tolist()], **self.decode_kwargs)
            self.on_finalized_text(text[self.print_len :] + "\n")
            self.token_cache, self.print_len = [], 0
        if len(last):
            super().put(last)
        now = time.perf_counter()
        if self.start is None:  # the first value is the prompt
            self.start = now
            return
        self.count += 1
        if self.count % self.every == 0:
            report = {"tokens": self.count, "tokens_per_second": self.every / (now - self.start)}
            report["cache_bytes"] = cache_bytes(self.cache)
            line = "  ".join(f"{name} {value:,.0f}" for name, value in report.items())
            print(f"\n{line}", file=sys.stderr, flush=True)
            self.reports.append(report)
            self.start = now

    def on_finalized_text(self, text: str, stream_end: bool = False):
        self.file.write(text)
        print(text, end="\n" if stream_end else "", flush=True)


def cache_bytes(cache) -> int:
    """Return the bytes of all tensors of a cache."""
    layers = (getattr(layer, "tensors", vars(layer)) for layer in cache.layers)  # Luna has a dictionary of tensors
    tensors = (value for fields in layers for value in fields.values() if isinstance(value, torch.Tensor))
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    (arguments,) = lib.parse_arguments((Arguments,), argv)
    lib.check_least(arguments, 1, "max_new_tokens", "report_every")
    lib.check_least(arguments, 0, "temperature", "top_k")
    set_seed(arguments.seed)
    model, tokenizer = lib.language_modeling.load_language_model(arguments.model_name_or_path, arguments.device)
    lib.language_modeling.apply_settings(arguments, tokenizer, "line_end")
    lib.check_choice(arguments, "line_end", ("newline", "eos"))
    prompt = lib.language_modeling.encode_prompt(arguments.prompt, tokenizer, arguments.line_end).to(model.device)
    if prompt.shape[1] == 0:
        lib.fail(f"--prompt {arguments.prompt!r} has no tokens")
    positions = lib.longest_input(model.config)
    if prompt.shape[1] > positions:
        lib.fail(f"--prompt has {prompt.shape[1]} tokens, but the model has {positions} positions; shorten it")
    if arguments.max_new_tokens > (most := positions + 1 - prompt.shape[1]):  # the last token is no input
        lib.say(
            f"--max_new_tokens {arguments.max_new_tokens} is reduced to {most}: the model has {positions} positions"
        )
        arguments.max_new_tokens = most
    model.generation_config.eos_token_id = None  # </s> ends a line or document, not the text
    options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature:
        options |= {"temperature": arguments.temperature, "top_k": arguments.top_k}
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with (output / "text.txt").open("w", encoding="utf-8") as file:
        end = tokenizer.eos_token_id if arguments.line_end == "eos" else -1
        streamer = MeasuredStreamer(tokenizer, file, arguments.report_every, end)
        model.register_forward_hook(streamer.save_cache)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **options)
    (output / "speed.json").write_text(json.dumps(streamer.reports, indent=2) + "\n", encoding="utf-8")
    return streamer.reports


if __name__ == "__main__":
    main()

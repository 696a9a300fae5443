"""Components of training scripts: options and recipes, data, models, tokenizers, Trainer, results and model cards.

Scripts import only from this package: names that all tasks use from the package itself, other names from the modules of
their tasks.
"""

# ruff: noqa: F401

from luna_mega.escaping import tsv_field
from luna_mega.hub.find import find_model
from luna_mega.hub.folder import load_tokenizer, remove_truncation
from luna_mega.training import images, language_modeling, optimization, streams, tokenizers
from luna_mega.training.arguments import (
    check_choice,
    check_least,
    check_max_tokens,
    check_no_file,
    fail,
    one_line,
    parse_arguments,
    say,
)
from luna_mega.training.classification import (
    Labels,
    TextArguments,
    accuracy,
    class_names,
    class_numbers,
    encode_split,
    match_labels,
    read_scores,
    write_predictions,
)
from luna_mega.training.data import (
    ClassifierArguments,
    LimitArguments,
    SourceArguments,
    StreamArguments,
    check_split,
    choose_splits,
    find_files,
    load_files,
    load_folder,
    load_from_hub,
    load_splits,
)
from luna_mega.training.models import (
    CheckpointArguments,
    ModelArguments,
    Tokenizers,
    boundary_ids,
    fit_lengths,
    label_fields,
    longest_input,
    make_both_tokenizers,
    make_config,
    make_model,
    make_tokenizer,
)
from luna_mega.training.products import use_onednn
from luna_mega.training.runs import Run, save, score, write_lines
from luna_mega.training.streams import Redrawn
from luna_mega.training.trainer import OrderedTrainer

"""A model, read from a checkpoint or to be exported to one."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Target:
    """A model class with its configuration, the revision of the original code, and the name of the head, if any."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    revision: str
    head: str | None = None

    @property
    def vocab_size(self) -> int | None:
        """Return the number of rows of the embedding; None for a model of real numbers."""
        return self.config.vocab_size if self.config.input_type == "tokens" else None


def problem_type(config: PreTrainedConfig) -> str:
    """Return `config.problem_type`, or the default of transformers if it is None."""
    return config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")

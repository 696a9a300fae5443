"""Components of training scripts: options and recipes, data, models, tokenizers, Trainer, results and model cards."""

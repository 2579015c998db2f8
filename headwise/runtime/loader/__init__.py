"""From a model's name to a directory with `config.json`, safetensors and `tokenizer.json`."""

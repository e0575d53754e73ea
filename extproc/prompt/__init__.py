"""Request to token ids, identical to the engine's: chat template, tokenizer, encoder."""

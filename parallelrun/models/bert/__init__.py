"""BERT: a bidirectional encoder trained to fill in masked tokens."""
